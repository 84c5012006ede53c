//! Files that lie: checkpoints, text, prepared text and recordings changed by chance, half of them with checksums made
//! to fit. The program refuses such a file with one message, or what it read is the same as before, or the change is a
//! file somebody might have meant; it never panics, never hangs, and never takes what contradicts itself.

mod attacks;
mod dice;
mod files;
mod stage;

use std::collections::BTreeMap;

use self::attacks::{ATTACKS, ATTACKS_OF_SEVERAL, Act, Meant};
use self::dice::Dice;
use self::stage::{Answer, Request, Stage};

const SEED: u64 = 16;

/// Those that `cargo test` tries.
#[test]
fn files_that_lie_are_refused() {
    attack(&Stage::new(), ATTACKS, 5);
    attack(&Stage::of_several(), ATTACKS_OF_SEVERAL, 5);
}

/// The same many times more: see `docs/testing.md`.
#[test]
#[ignore = "takes minutes"]
fn files_that_lie_are_refused_a_thousand_times() {
    attack(&Stage::new(), ATTACKS, 60);
    attack(&Stage::of_several(), ATTACKS_OF_SEVERAL, 60);
}

/// Makes attack after attack, each kind so many times in its turn, and counts what came of them.
#[expect(clippy::print_stderr, reason = "figures, for who asks for them")]
fn attack(stage: &Stage, attacks: &[(&'static str, Act)], times: usize) {
    let mut plain: BTreeMap<Request, Answer> = BTreeMap::new();
    let (mut counts, mut wrong): (BTreeMap<&str, [usize; 4]>, Vec<String>) = Default::default();
    for case in 0..times * attacks.len() {
        let (name, act) = attacks[case % attacks.len()];
        let mut dice = Dice::new(SEED, case);
        let attack = act(stage, &mut dice);
        let answer = stage.ask(attack.request);
        stage.restore();
        let same = plain.entry(attack.request).or_insert_with(|| {
            let answer = stage.ask(attack.request);
            stage.restore();
            answer
        });
        assert!(matches!(same, Answer::Done(_)), "{:?} as it is: {same:?}", attack.request);
        let outcome = match &answer {
            Answer::Refused(2, _) => Ok(0),
            Answer::Refused(..) => Ok(1),
            answer if answer == same => Ok(2),
            Answer::Done(_) if attack.meant == Meant::Perhaps => Ok(3),
            answer => Err(format!("case {case}, {name}, {:?}, {}: {answer:?}", attack.request, attack.told)),
        };
        match outcome {
            Ok(column) => counts.entry(name).or_default()[column] += 1,
            Err(told) => wrong.push(told),
        }
    }
    eprintln!("{:<28} {:>8} {:>8} {:>8} {:>8}", "", "code 2", "code 1", "the same", "meant");
    for (name, columns) in &counts {
        eprintln!("{name:<28} {:>8} {:>8} {:>8} {:>8}", columns[0], columns[1], columns[2], columns[3]);
    }
    assert!(wrong.is_empty(), "{} of them were taken wrongly:\n{}", wrong.len(), wrong.join("\n"));
}
