//! Masked tokens: as many as asked for, of each kind; others in every pass and the same on every mesh, on resume, and
//! in every evaluation.

use std::collections::BTreeMap;
use std::sync::Arc;

use guildhall::data::{BatchPlan, Error, IGNORE, Loader, Masked, Row, Source, Tokenizer, eval_batches};

/// Rows of `seq` tokens each, all 100 but for an end of text at the end of each row.
struct Constant {
    rows: usize,
    seq: usize,
    end_of_text: u32,
}

const TOKEN: u32 = 100;

impl Source for Constant {
    fn len(&self) -> usize {
        self.rows
    }

    fn seq(&self) -> usize {
        self.seq
    }

    fn get(&self, _index: usize, _pass: u64) -> Result<Row, Error> {
        let mut tokens = vec![TOKEN; self.seq];
        tokens[self.seq - 1] = self.end_of_text;
        let targets = tokens[1..].iter().copied().chain([IGNORE]).collect();
        Ok(Row {
            tokens,
            targets,
            segments: vec![0; self.seq],
            positions: (0..self.seq as u32).collect(),
            ..Row::default()
        })
    }

    fn fingerprint(&self) -> String {
        format!("constant {} {}", self.rows, self.seq)
    }
}

fn tokenizer() -> Tokenizer {
    Tokenizer::train(&["the cat sat on the mat and the hat ".repeat(9)], 280, None).unwrap()
}

fn masked(rows: usize, seq: usize, rate: f64, seed: u64) -> Masked<Constant> {
    let tokenizer = tokenizer();
    let end_of_text = tokenizer.end_of_text();
    Masked::new(Constant { rows, seq, end_of_text }, &tokenizer, rate, seed).unwrap()
}

fn rows(source: &dyn Source, pass: u64) -> Vec<Row> {
    (0..source.len()).map(|index| source.get(index, pass).unwrap()).collect()
}

/// Whether `count` of `n` is near the share `p`: within five standard errors.
#[track_caller]
fn expect_share(what: &str, count: usize, n: usize, p: f64) {
    let (share, error) = (count as f64 / n as f64, (p * (1.0 - p) / n as f64).sqrt());
    assert!((share - p).abs() < 5.0 * error, "{what}: {share} of {n} instead of {p} +- {error}");
}

#[test]
fn tokens_are_selected_and_changed_in_the_published_shares() {
    const ROWS: usize = 4000;
    const SEQ: usize = 101;
    let tokenizer = tokenizer();
    let (mask, vocab) = (tokenizer.mask().unwrap(), tokenizer.vocab());
    for rate in [0.15, 0.4] {
        let (mut selected, mut kinds, mut random) = (0, [0; 3], BTreeMap::<u32, usize>::new());
        for row in rows(&masked(ROWS, SEQ, rate, 7), 3) {
            assert_eq!((row.tokens[SEQ - 1], row.targets[SEQ - 1]), (tokenizer.end_of_text(), IGNORE));
            for (&token, &target) in row.tokens.iter().zip(&row.targets).take(SEQ - 1) {
                if target == IGNORE {
                    assert_eq!(token, TOKEN, "what is not selected stays");
                    continue;
                }
                assert_eq!(target, TOKEN, "the hidden token is the target");
                selected += 1;
                let kind = [mask, TOKEN].iter().position(|known| *known == token).unwrap_or(2);
                kinds[kind] += 1;
                *random.entry(token).or_default() += 1;
            }
            assert_eq!(row.positions, Vec::from_iter(0..SEQ as u32));
        }
        expect_share("selected", selected, ROWS * (SEQ - 1), rate);
        // One random token in `vocab` is the mask, and one the token itself.
        let each = 0.1 / vocab as f64;
        expect_share("masked", kinds[0], selected, 0.8 + each);
        expect_share("kept", kinds[1], selected, 0.1 + each);
        expect_share("random", kinds[2], selected, 0.1 - 2.0 * each);
        assert_eq!(random.len(), vocab, "any token may stand there");
        random.iter().filter(|(token, _)| ![mask, TOKEN].contains(token)).for_each(|(token, &count)| {
            expect_share(&format!("token {token}"), count, selected, each);
        });
    }
}

#[test]
fn everything_may_be_selected() {
    let row = masked(1, 50, 1.0, 0).get(0, 0).unwrap();
    assert_eq!(row.targets[..49], [TOKEN; 49]);
}

#[test]
fn every_pass_row_and_seed_has_a_mask_of_its_own() {
    let source = masked(20, 60, 0.3, 1);
    let first = rows(&source, 0);
    assert_eq!(rows(&source, 0), first);
    assert_ne!(rows(&source, 1), first);
    assert_ne!(rows(&masked(20, 60, 0.3, 2), 0), first);
    assert!((1..20).all(|index| first[index] != first[0]), "rows of equal tokens, masked alike");
    let names = [1, 2].map(|seed| masked(20, 60, 0.3, seed).fingerprint());
    assert!(names[0] != names[1] && names[0] == source.fingerprint());
}

/// The steps put together from all ranks are those of one rank, in whatever micro-batches; so they are when begun in
/// the middle; and the second time a row comes, it is masked otherwise.
#[test]
fn neither_mesh_nor_resuming_changes_a_mask() {
    const ROWS: usize = 12;
    let source: Arc<dyn Source> = Arc::new(masked(ROWS, 16, 0.3, 5));
    let plan = |micro_batch, rank, ranks| BatchPlan { seed: 5, rows_per_step: 8, micro_batch, rank, ranks };
    let of_rank = |plan: BatchPlan, first: u64| {
        let mut loader = Loader::new(source.clone(), plan, first).unwrap();
        (first..6).map(|_| loader.next().unwrap()).collect::<Vec<_>>()
    };
    let whole = of_rank(plan(8, 0, 1), 0);
    for (step, batches) in whole.iter().enumerate() {
        let (tokens, targets) = (&batches.micro[0].tokens, &batches.micro[0].targets);
        for (micro_batch, ranks) in [(8, 2), (3, 2), (2, 4)] {
            let mut found = (Vec::new(), Vec::new());
            for micro in 0..plan(micro_batch, 0, ranks).micro_batches() {
                for rank in 0..ranks {
                    let part = plan(micro_batch, rank, ranks).batch(source.as_ref(), step as u64, micro).unwrap();
                    found.0.extend(part.tokens);
                    found.1.extend(part.targets);
                }
            }
            assert_eq!((&found.0, &found.1), (tokens, targets), "step {step} on {ranks} ranks");
        }
    }
    assert_eq!(of_rank(plan(8, 0, 1), 4), whole[4..]);
    // Six steps are four passes of two steps of eight rows over twelve.
    let met = |place: usize| plan(8, 0, 1).row(source.as_ref(), place as u64 / 8, place % 8);
    let of_row = |pass: usize| (0..ROWS).map(|i| pass * ROWS + i).find(|&place| met(place).0 == 0).unwrap();
    let tokens = |place: usize| &whole[place / 8].micro[0].tokens[place % 8 * 16..][..16];
    assert_ne!(tokens(of_row(0)), tokens(of_row(1)), "row 0 in two passes");
}

#[test]
fn every_evaluation_masks_alike() {
    let source = masked(9, 16, 0.3, 0);
    let batches = |micro, ranks| {
        let of_rank = |rank| eval_batches(&source, 7, micro, rank, ranks).unwrap().map(Result::unwrap);
        let all: Vec<Vec<_>> = (0..ranks).map(|rank| of_rank(rank).collect()).collect();
        let by_micro = (0..all[0].len()).flat_map(|i| all.iter().map(move |batches| batches[i].tokens.clone()));
        by_micro.flatten().collect::<Vec<u32>>()
    };
    let want: Vec<u32> = rows(&source, 0).into_iter().take(7).flat_map(|row| row.tokens).collect();
    for (micro, ranks) in [(7, 1), (2, 1), (3, 2), (4, 4)] {
        assert_eq!(batches(micro, ranks), want);
    }
}

#[test]
fn a_mask_token_cannot_be_written() {
    let tokenizer = tokenizer();
    let mask = tokenizer.mask().unwrap();
    assert_eq!(tokenizer.decode(&[mask]).unwrap(), "<mask>");
    let tokens = tokenizer.encode("a<mask>b").unwrap();
    assert!(!tokens.contains(&mask));
    assert_eq!(tokenizer.decode(&tokens).unwrap(), "a<mask>b");
}

#[test]
fn a_given_tokenizer_names_its_mask_or_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let named = |name: &str| {
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, tokenizer().to_json().unwrap().replace("<mask>", name)).unwrap();
        Tokenizer::open(&path, None).unwrap().mask()
    };
    let mask = tokenizer().mask().unwrap();
    assert_eq!((named("[MASK]").unwrap(), named("<mask>").unwrap()), (mask, mask));
    let message = named("<hidden>").unwrap_err().to_string();
    for part in ["`<mask>`, `[MASK]`", "tokenizer.json", "data.tokenizer"] {
        assert!(message.contains(part), "{message}");
    }
    // The end of text is no mask, whatever its name.
    let both = Tokenizer::train(&["text".to_owned()], 280, Some("<mask>")).unwrap();
    assert!(both.mask().is_err());
}
