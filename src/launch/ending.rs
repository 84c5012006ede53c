//! How ranks end, in words that travel: processes that hear the same come to the same verdict.

use std::fmt::{self, Display};

use guildhall_comm::Failure;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// A failure of a rank that other processes can be told of.
pub trait Tellable: Display + Send {
    /// What whoever began the run must know of it besides its text.
    type Kind: Serialize + DeserializeOwned;

    fn kind(&self) -> Self::Kind;

    /// Whether another rank's failure was the cause.
    fn is_consequence(&self) -> bool;
}

/// Why a run failed: the same in all of its processes.
#[derive(Clone, Debug, PartialEq)]
pub struct RunFailure<K> {
    /// The rank that began it.
    pub rank: usize,
    /// Absent where it could not say: its device failed before it began, it panicked, or was lost.
    pub kind: Option<K>,
    pub text: String,
}

impl<K> Display for RunFailure<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Why something that processes do before there are ranks was not done.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// Whether the request was wrong.
    pub is_request: bool,
    pub text: String,
}

/// How a rank ended.
#[derive(Debug, PartialEq)]
pub(super) enum Ending<K> {
    Done,
    Failed {
        kind: Option<K>,
        is_consequence: bool,
        text: String,
    },
    /// It is gone, for this reason.
    Lost(String),
    /// It has not said so in time.
    Silent(String),
}

/// What stands before the text: short, so that no length of the text can cut it.
#[derive(Serialize, Deserialize)]
enum Opening<K> {
    Done,
    Failed { kind: Option<K>, is_consequence: bool },
}

impl<K: Serialize + DeserializeOwned> Ending<K> {
    pub(super) fn of<T, E: Tellable<Kind = K>>(result: &Result<T, Failure<E>>) -> Ending<K> {
        match result {
            Ok(_) => Ending::Done,
            Err(failure @ Failure::Returned(error)) => Ending::Failed {
                kind: Some(error.kind()),
                is_consequence: error.is_consequence(),
                text: failure.to_string(),
            },
            Err(failure) => {
                let is_consequence = matches!(failure, Failure::OfDevice { trouble, .. } if trouble.is_consequence);
                Ending::Failed { kind: None, is_consequence, text: failure.to_string() }
            }
        }
    }

    pub(super) fn words(&self) -> String {
        let (head, text) = match self {
            Ending::Lost(text) | Ending::Silent(text) => {
                (serde_json::to_string(&Opening::<K>::Failed { kind: None, is_consequence: false }), text.as_str())
            }
            Ending::Done => (serde_json::to_string(&Opening::<K>::Done), ""),
            Ending::Failed { kind, is_consequence, text } => {
                let head = Opening::Failed { kind: kind.as_ref(), is_consequence: *is_consequence };
                (serde_json::to_string(&head), text.as_str())
            }
        };
        format!("{}\n{text}", head.expect("a kind is plain JSON"))
    }

    /// The ending that such words tell; what is no ending is a failure to tell one.
    pub(super) fn from_words(words: &str) -> Ending<K> {
        let (head, text) = words.split_once('\n').unwrap_or((words, ""));
        match serde_json::from_str(head) {
            Ok(Opening::Done) => Ending::Done,
            Ok(Opening::Failed { kind, is_consequence }) => {
                Ending::Failed { kind, is_consequence, text: text.to_owned() }
            }
            Err(error) => Ending::Lost(format!("it told how it ended in words of another program: {error}")),
        }
    }
}

/// What a process makes of the endings of all ranks, in rank order: of failures that no other caused the first; else the one
/// rank that said nothing, since of several some may only be busy; else any. Of a rank that is lost, others tell where it
/// was missed.
pub(super) fn verdict<K>(endings: Vec<(usize, Ending<K>)>) -> Option<RunFailure<K>> {
    let mut failures: Vec<(bool, bool, RunFailure<K>)> = Vec::new();
    let mut silent = Vec::new();
    for (rank, ending) in endings {
        match ending {
            Ending::Done => {}
            Ending::Failed { kind, is_consequence, text } => {
                failures.push((is_consequence, false, RunFailure { rank, kind, text }));
            }
            Ending::Lost(text) => failures.push((false, true, RunFailure { rank, kind: None, text })),
            Ending::Silent(text) => silent.push((false, true, RunFailure { rank, kind: None, text })),
        }
    }
    let is_unexplained = failures.iter().all(|(is_consequence, ..)| *is_consequence);
    if is_unexplained && (failures.is_empty() || silent.len() == 1) {
        failures.extend(silent);
    }
    let missed = failures.iter().find(|(_, is_lost, _)| !is_lost);
    let missed = missed.map(|(.., failure)| format!("\n  missed by rank {}: {}", failure.rank, failure.text));
    let (_, is_lost, mut failure) = cause(failures, |(is_consequence, ..)| *is_consequence)?;
    if is_lost {
        failure.text.extend(missed);
    }
    Some(failure)
}

/// The failure that began it: of those that no other caused the first, else any.
pub(super) fn cause<F>(mut failures: Vec<F>, is_consequence: impl Fn(&F) -> bool) -> Option<F> {
    let cause = failures.iter().position(|failure| !is_consequence(failure)).unwrap_or(0);
    (!failures.is_empty()).then(|| failures.swap_remove(cause))
}

impl Refusal {
    /// The words of a result.
    pub(super) fn words(result: Result<(), &Refusal>) -> String {
        match result {
            Ok(()) => "done".to_owned(),
            Err(Refusal { is_request: true, text }) => format!("request\n{text}"),
            Err(Refusal { is_request: false, text }) => format!("run\n{text}"),
        }
    }

    pub(super) fn from_words(words: &str) -> Result<(), Refusal> {
        let (head, text) = words.split_once('\n').unwrap_or((words, ""));
        match head {
            "done" => Ok(()),
            head => Err(Refusal { is_request: head == "request", text: text.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(kind: Option<u32>, is_consequence: bool, text: &str) -> Ending<u32> {
        Ending::Failed { kind, is_consequence, text: text.to_owned() }
    }

    #[test]
    fn endings_and_refusals_survive_their_words() {
        for ending in [Ending::Done, failed(Some(7), true, "two\nlines"), failed(None, false, "")] {
            assert_eq!(Ending::<u32>::from_words(&ending.words()), ending);
        }
        assert!(matches!(Ending::<u32>::from_words("?"), Ending::Lost(_)));
        for is_request in [true, false] {
            let refusal = Refusal { is_request, text: "two\nlines".to_owned() };
            assert_eq!(Refusal::from_words(&Refusal::words(Err(&refusal))), Err(refusal));
        }
        assert_eq!(Refusal::from_words(&Refusal::words(Ok(()))), Ok(()));
    }

    #[test]
    fn the_first_failure_that_no_other_caused_is_the_verdict() {
        let of = |endings: Vec<Ending<u32>>| {
            verdict(endings.into_iter().enumerate().collect()).map(|verdict| (verdict.rank, verdict.kind))
        };
        assert_eq!(of(vec![Ending::Done, Ending::Done]), None);
        assert_eq!(of(vec![failed(Some(1), true, ""), Ending::Done, failed(Some(2), false, "")]), Some((2, Some(2))));
        assert_eq!(of(vec![Ending::Done, failed(Some(1), true, "")]), Some((1, Some(1))));
        assert_eq!(of(vec![failed(Some(1), true, ""), failed(None, false, "")]), Some((1, None)));
    }

    /// A rank that says nothing may be busy: it is blamed if it is the one that does and nobody has another cause.
    #[test]
    fn who_says_nothing_is_blamed_last() {
        let silent = || Ending::Silent("rank 0 did not say".to_owned());
        let of = |endings: Vec<Ending<u32>>| {
            verdict(endings.into_iter().enumerate().collect()).map(|verdict| (verdict.rank, verdict.text)).unwrap()
        };
        let missed = |is_consequence| failed(Some(1), is_consequence, "step 7: no answer from rank 2");
        assert_eq!(of(vec![silent(), missed(false)]), (1, "step 7: no answer from rank 2".to_owned()));
        let (rank, text) = of(vec![silent(), missed(true)]);
        assert_eq!((rank, &text[..]), (0, "rank 0 did not say\n  missed by rank 1: step 7: no answer from rank 2"));
        let (rank, text) = of(vec![silent(), missed(true), silent()]);
        assert_eq!((rank, &text[..]), (1, "step 7: no answer from rank 2"), "which of the two it is, nobody knows");
        assert_eq!(of(vec![silent(), Ending::Done]), (0, "rank 0 did not say".to_owned()));
    }

    #[test]
    fn others_tell_where_a_lost_rank_was_missed() {
        let lost = || Ending::Lost("rank 1 is gone".to_owned());
        let text = |endings: Vec<Ending<u32>>| {
            verdict(endings.into_iter().enumerate().collect()).map(|verdict| verdict.text).unwrap()
        };
        let missed = |is_consequence| failed(Some(1), is_consequence, "step 7: no answer");
        // Who waited for it until the timeout has failed by itself.
        for is_consequence in [true, false] {
            let told = text(vec![lost(), missed(is_consequence)]);
            assert_eq!(told, "rank 1 is gone\n  missed by rank 1: step 7: no answer");
        }
        assert_eq!(text(vec![Ending::Done, lost()]), "rank 1 is gone");
    }
}
