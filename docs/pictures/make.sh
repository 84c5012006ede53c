#!/usr/bin/env bash
# Makes the README's pictures and its sample output from a real run, so that they show what the program does.
#
#   docs/pictures/make.sh            trains the quickstart, then draws
#   docs/pictures/make.sh --draw     draws again from the last such run
#   docs/pictures/make.sh --check    trains ten steps; fails if the README's sample has other words, numbers aside
#
# Needs bash, awk, sed, and to draw also chromium (Debian: apt-get install chromium). GUILDHALL names a binary to use
# instead of building one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec </dev/null

pictures=docs/pictures
work=runs/pictures
recipe=recipes/quickstart.toml
run=runs/quickstart
shown=target/release/guildhall
mkdir -p "$work"
# Colours of the terminal's picture.
paper="#1c2027" ink="#e4e7ec" soft="#98a1af" accent="#63c48b"

program=${GUILDHALL:-}
if [ -z "$program" ] && [ "${1:-}" != --draw ]; then
    cargo build --release
    program=$shown
fi

# What a reader would see: the program by its usual path, and of its progress the data's last line, the first two steps,
# the first evaluation and the last two steps. That an earlier run was moved aside is left out.
shorten() {
    sed "s#${program:-$shown}#$shown#g" | awk '
        /^data / && !/ held out/ { next }
        /^note: .* earlier run left/ { next }
        /^step / { steps[++n] = $0; if (!evaluated && n > 2 && / eval /) evaluated = n; next }
        n && !told { show() }
        { print }
        function show(  i, last) {
            for (i = 1; i <= n; i++) {
                if (i > 2 && i < n - 1 && i != evaluated) continue
                if (i > last + 1) print "..."
                print steps[i]
                last = i
            }
            told = 1
        }'
}

# Lines with their numbers masked, each once, without that of products, which depends on the processor; tests/it/readme.rs
# does the same.
shapes() {
    sed -E -e 's/[0-9][0-9.,]*/#/g' -e 's/# ?([kMGT]?B|[kMGT])([ ),:;]|$)/#\2/g' -e 's/#(h|m|s|ms)([ ),:;]|$)/#\2/g' \
        -e '/^\.\.\.$/d' -e '/^products /d' | awk '!seen[$0]++'
}

sample_of_readme() {
    awk '/<!-- end of sample -->/ { inside = 0 } inside && !/^```/ { print } /<!-- sample/ { inside = 1 }' README.md
}

train() {
    rm -rf "$work/cache"
    "$program" train "$recipe" --set data.cache="$work/cache" "$@"
}

check() {
    rm -rf "$work/check"
    train --set run.dir="$work/check" --set train.steps=10 --set train.warmup_steps=1 --set train.eval_every=5 \
        2>"$work/check.txt"
    diff <(sample_of_readme | shapes) <(sed "s#$work/check#$run#g" "$work/check.txt" | shorten | shapes) || {
        echo "the README's sample (left) is not what the program prints (right): run $pictures/make.sh" >&2
        exit 1
    }
    echo "the README's sample has the program's words"
}

record() {
    train 2>&1 >"$work/unused.txt" | tee "$work/train.txt" >&2
    "$program" generate "$run/checkpoints/latest" --prompt "pub fn " --tokens 90 >"$work/generate.txt"
}

write_sample() {
    { echo '```'; shorten <"$work/train.txt"; echo '```'; } >"$work/sample.txt"
    awk -v sample="$work/sample.txt" '
        /<!-- end of sample -->/ { inside = 0 }
        !inside { print }
        /<!-- sample/ { inside = 1; while ((getline line < sample) > 0) print line }' README.md >"$work/README.md"
    cp "$work/README.md" README.md
}

session() {
    echo "$ cargo run --release -- train $recipe"
    shorten <"$work/train.txt"
    echo
    echo "$ $shown generate $run/checkpoints/latest --prompt \"pub fn \" --tokens 90"
    cat "$work/generate.txt"
}

# Lines too long for the picture go on in the next, below the text after their first word where that stands in a column.
wrap() {
    awk -v width=104 '{
        line = $0; indent = substr(line, 1, 9) ~ /^[a-z]+ +$/ ? "         " : ""
        while (length(line) > width) {
            cut = width
            while (cut > 20 && substr(line, cut, 1) != " ") cut--
            print substr(line, 1, cut - 1)
            line = indent substr(line, cut + 1)
        }
        print line
    }'
}

draw_terminal() {
    session | wrap | awk -v paper="$paper" -v ink="$ink" -v soft="$soft" -v accent="$accent" '
        { gsub(/&/, "\\&amp;"); gsub(/</, "\\&lt;"); gsub(/>/, "\\&gt;"); lines[NR] = $0 }
        END {
            height = NR * 18 + 58
            printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 880 %d\" width=\"880\" height=\"%d\">\n", height, height
            printf "<rect width=\"880\" height=\"%d\" rx=\"8\" fill=\"%s\"/>\n", height, paper
            for (i = 0; i < 3; i++) printf "<circle cx=\"%d\" cy=\"18\" r=\"5\" fill=\"%s\" opacity=\".5\"/>\n", 20 + 18 * i, soft
            printf "<g font-family=\"ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace\" font-size=\"13\" fill=\"%s\">\n", ink
            for (i = 1; i <= NR; i++) {
                colour = lines[i] ~ /^\$ / ? " fill=\"" accent "\"" : lines[i] == "..." ? " fill=\"" soft "\"" : ""
                printf "<text x=\"18\" y=\"%d\" xml:space=\"preserve\"%s>%s</text>\n", 34 + 18 * i, colour, lines[i]
            }
            print "</g>\n</svg>"
        }' >"$pictures/terminal.svg"
}

# A picture of the report of this height, with more style to leave parts out.
shoot() {
    local name=$1 height=$2 style=$3 page
    page=$(realpath "$work")/$name.html
    awk -v style="$style" '/<\/style>/ && !done { print style; done = 1 } { print }' "$run/report.html" >"$page"
    chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --force-color-profile=srgb \
        --blink-settings=preferredColorScheme=1 --window-size="1120,$height" --screenshot="$(realpath "$pictures")/$name.png" \
        "file://$page" 2>"$work/chromium.txt" || { cat "$work/chromium.txt" >&2; exit 1; }
}

draw() {
    command -v chromium >/dev/null || { echo "chromium is missing: apt-get install chromium" >&2; exit 1; }
    write_sample
    draw_terminal
    shoot report 762 ''
    shoot experts 880 'header, section:not(:has(.layer)) { display: none } main { padding-top: 0 }'
}

case "${1:-}" in
    --check) check ;;
    --draw) draw ;;
    "") record; draw ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
