"""Scores of sacrebleu for small corpora of our own sentences, changed at random, in many scripts.

A corpus is a list of hypotheses and a list of references for each; it is scored with several choices of options. The
numbers are kept as Python writes them, which reads back to the same float64.
"""
import json
import os
import random

import sacrebleu
from sacrebleu.metrics import BLEU, CHRF

assert sacrebleu.__version__ == "2.6.0", "src/score/mod.rs names the release"
GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden", "scores.json")

SENTENCES = [
    "The expert that was chosen most often received 1,234.5 tokens in the first step.",
    "Don't close the window before the file has been saved!",
    "Was the router's noise (0.01) turned off at evaluation?",
    "It costs $3,500.00 -- or about 3.200,50 € -- per year; that's 12-14% more.",
    "<p>Fish &amp; chips</p> &quot;quoted&quot; &lt;tag&gt; &amp;lt; &apos;s",
    "state-of-the-art, e.g. on 2024-05-17 at 10:30 a.m., costs $5.",
    "A B C D E F G",
    "one",
    "No.",
    "...",
    "e-mail: someone@example.org, see https://example.org/a_b?c=1&d=2#e",
    "Der Fachmann, den man „Experte“ nennt, bekam 1.234,5 Zeichen – über 90 % davon.",
    "Größe, Straße und Äpfel; ẞ wird ß, İstanbul wird ıstanbul.",
    "Le vérificateur n’a rien trouvé : « tout va bien » !",
    "¿Cuántos archivos hay en la carpeta? ¡Más de 1 000 000!",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Файл не найден: проверьте путь «/home/user/данные.txt» и повторите попытку.",
    "Ціна зросла на 3,5 % — до ₴1 250.",
    "Το αρχείο ΔΕΝ βρέθηκε· δοκιμάστε ξανά; ΟΔΥΣΣΕΥΣ",
    "文件“数据.txt”没有找到，请检查路径（共3个）。",
    "専門家は1,234個のトークンを受け取りました。カタカナと㈱と全角ＡＢＣ！",
    "파일을 찾을 수 없습니다. 경로를 확인하십시오.",
    "لم يتم العثور على الملف، تحقق من المسار (٣٫٥٪)؟",
    "הקובץ לא נמצא, בדקו את הנתיב.",
    "फ़ाइल नहीं मिली। कृपया १,२३४ पथ जाँचें।",
    "ไม่พบไฟล์ที่ระบุ กรุณาตรวจสอบ ๑๒ ครั้ง",
    "Well done 👍🏽 👩‍💻 ❤️ — 🇩🇪🇫🇷 ✓ ☂ ➜ ∑x² ≠ ½ ⅷ Ⅻ",
    "𠀀𠮷野家 and 𝒜𝓑 and 𝟙𝟚,𝟛",
    "dotted i\u0307 and cafe\u0301 and o\ufb03ce",
    "f(x)=a[i]{j}|k~l^m`n\\o\"p'q<r>s/t*u+v-w_x:y;z",
]
SPACES = [" ", "  ", "\t", "\u00a0", "\u3000", "\u200b", "\u2028", "\x1c", "\x1f", "\x85", "\r", "\n", "-\n", "\ufeff"]
SIGNS = [".", ",", "!", "?", ";", "-", "–", "…", "“", "”", "'", "&", "&amp;", "&quot;", "<skipped>", "%", "$", "€", "。",
         "，", "、", "؟", "।", "1,000", "1.5", "7-8", "½", "٣", "👍", "\u0301"]


def mutated(rng, line):
    words = line.split(" ")
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3, 6])):
        at = rng.randrange(len(words) + 1)
        what = rng.randrange(9)
        here = words[at:at + 1]
        if what == 0:
            words[at:at + 1] = []
        elif what == 1:
            words[at:at] = [rng.choice(rng.choice(SENTENCES).split())]
        elif what == 2:
            words[at:at] = [rng.choice(SIGNS)]
        elif what == 3 and here:
            words[at] = here[0] + rng.choice(SIGNS)
        elif what == 4 and here:
            words[at] = rng.choice(SIGNS) + here[0]
        elif what == 5 and here:
            words[at] = rng.choice([str.upper, str.lower, str.title, str.swapcase])(here[0])
        elif what == 6 and here:
            words[at:at + 1] = here * 2
        elif what == 7 and here and here[0]:
            cut = rng.randrange(len(here[0]))
            words[at] = here[0][:cut] + here[0][cut + 1:]
        elif what == 8:
            rng.shuffle(words)
    space = rng.choice(SPACES) if rng.random() < 0.25 else " "
    line = "".join(word + (space if rng.random() < 0.2 else " ") for word in words)
    return line if rng.random() < 0.15 else line.strip(" ")


def segment(rng, references):
    base = rng.choice(SENTENCES)
    if rng.random() < 0.3:
        base = base + " " + rng.choice(SENTENCES)
    line = lambda: "" if rng.random() < 0.04 else mutated(rng, base)
    hypothesis = line() if rng.random() < 0.92 else rng.choice(SENTENCES + ["", " ", "the", "the the the the the the the"])
    refs = [line() for _ in range(references)]
    if rng.random() < 0.15:
        refs[-1] = hypothesis
    return hypothesis, refs


def bleu_case(options, hypotheses, streams):
    metric = BLEU(**options)
    score = metric.corpus_score(hypotheses, streams)
    assert score.counts is not None
    signature = metric.get_signature().format()
    texts = {str(width): score.format(width=width, signature=signature) for width in (1, 2, 4)}
    return {"options": options, "score": score.score, "precisions": score.precisions, "bp": score.bp,
            "totals": [score.sys_len, score.ref_len], "texts": texts}


def chrf_case(options, hypotheses, streams):
    metric = CHRF(**options)
    score = metric.corpus_score(hypotheses, streams)
    signature = metric.get_signature().format()
    texts = {str(width): score.format(width=width, signature=signature) for width in (1, 2, 4)}
    return {"options": options, "score": score.score, "texts": texts}


def bleu_options(rng):
    method = rng.choice(["exp", "exp", "floor", "add-k", "none"])
    value = {"floor": [None, 0.1, 0.01, 1.0], "add-k": [None, 1, 0.5, 2]}.get(method, [None])
    return {"tokenize": rng.choice(["13a", "13a", "intl", "zh", "char", "none"]), "lowercase": rng.random() < 0.3,
            "smooth_method": method, "smooth_value": rng.choice(value), "effective_order": rng.random() < 0.4}


def chrf_options(rng):
    return {"char_order": rng.choice([6, 6, 6, 1, 4]), "word_order": rng.choice([0, 2, 2, 1]),
            "beta": rng.choice([2, 2, 1, 3]), "lowercase": rng.random() < 0.3, "whitespace": rng.random() < 0.3,
            "eps_smoothing": rng.random() < 0.2}


def fixed():
    """Corpora that chance would seldom make."""
    yield [""], [[""]]
    yield [""], [["a reference"]]
    yield ["a hypothesis"], [[""]]
    yield ["one"], [["one"]]
    yield ["one"], [["two"]]
    yield ["a b c"], [["a b c"]]
    yield ["a b c d"], [["a b c d"]]
    # Of lengths 3 and 5 the shorter is as near to 4.
    yield ["a b c d"], [["a b c d e", "a b c"]]
    yield ["a b c d"], [["a b c", "a b c d e"]]
    yield ["a a b b"], [["a a c", "b b c"]]
    # Two references of the same F-score.
    yield ["ab cd"], [["ab", "cd"]]
    # Precisions with a tie in the digit that is printed: 1/8 and 3/16.
    yield ["a b c d e f g h"], [["a z y x w v u t"]]
    yield ["a b c d e f g h i j k l m n o p"], [["a b c 1 2 3 4 5 6 7 8 9 0 q r s"]]
    yield ["a b c d", ""], [["a b c d"], ["e"]]
    for sentence in SENTENCES:
        yield [sentence], [[sentence.lower()]]
    # Every sign alone between letters, digits and spaces.
    for low in range(0x20, 0x7f, 32):
        signs = [chr(c) for c in range(low, min(low + 32, 0x7f))]
        yield [f"a{s}b 1{s}2 a{s}2 1{s}b {s} {s}{s}" for s in signs], [[f"a {s} b 1 {s} 2 a{s} 2 1{s}b {s}"] for s in signs]


def corpora(rng):
    yield from fixed()
    for _ in range(170):
        lines = rng.choice([1, 1, 1, 2, 2, 3, 3, 5, 8, 8, 20, 50])
        references = rng.choice([1, 1, 1, 2, 3])
        varied = references > 1 and rng.random() < 0.3
        both = [segment(rng, rng.randint(1, references) if varied else references) for _ in range(lines)]
        yield [hypothesis for hypothesis, _ in both], [refs for _, refs in both]


def main():
    rng, cases, scored = random.Random(20), [], 0
    for hypotheses, references in corpora(rng):
        most = max(map(len, references))
        streams = [[refs[i] if i < len(refs) else None for refs in references] for i in range(most)]
        bleu = [{}] + [bleu_options(rng) for _ in range(3)]
        chrf = [{}, {"word_order": 2}] + [chrf_options(rng) for _ in range(2)]
        bleu = [bleu_case(options, hypotheses, streams) for options in bleu]
        chrf = [chrf_case(options, hypotheses, streams) for options in chrf]
        cases.append({"hypotheses": hypotheses, "references": references, "bleu": bleu, "chrf": chrf})
        scored += len(bleu) + len(chrf)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases)
    with open(GOLDEN, "w", encoding="utf-8", newline="\n") as file:
        file.write(f"[\n{lines}\n]\n")
    print(f"{len(cases)} corpora, {scored} scores, {os.path.getsize(GOLDEN)} bytes")


main()
