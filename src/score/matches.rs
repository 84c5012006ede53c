//! Shares of outputs that are right as they are.

use super::{Error, checked};

/// The share of hypotheses that equal one of their references, but for white space around them.
///
/// # Errors
/// Numbers of hypotheses and segments that differ, no segment, or a segment without a reference.
pub fn exact_match<H: AsRef<str>, R: AsRef<str>>(hypotheses: &[H], references: &[Vec<R>]) -> Result<f64, Error> {
    let equal = |(hypothesis, references): (&H, &Vec<R>)| {
        references.iter().any(|reference| reference.as_ref().trim() == hypothesis.as_ref().trim())
    };
    Ok(checked(hypotheses, references)?.map(equal).filter(|&equal| equal).count() as f64 / hypotheses.len() as f64)
}

/// The share of predictions that equal their labels.
///
/// # Errors
/// Numbers of predictions and labels that differ, or none.
pub fn accuracy<T: PartialEq>(predictions: &[T], labels: &[T]) -> Result<f64, Error> {
    if predictions.len() != labels.len() {
        return Err(Error::Lengths { hypotheses: predictions.len(), references: labels.len() });
    }
    if predictions.is_empty() {
        return Err(Error::Nothing);
    }
    let right = predictions.iter().zip(labels).filter(|(prediction, label)| prediction == label).count();
    Ok(right as f64 / predictions.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_all_segments() {
        let references = vec![vec!["a b", "c"], vec!["d"], vec!["e"], vec![" f "]];
        assert_eq!(exact_match(&["c", "d ", "E", "f"], &references), Ok(0.75));
        assert_eq!(accuracy(&[1, 2, 3, 4], &[1, 0, 3, 0]), Ok(0.5));
    }

    #[test]
    fn what_has_no_share_is_an_error() {
        assert_eq!(accuracy::<u8>(&[], &[]), Err(Error::Nothing));
        assert_eq!(accuracy(&[1], &[1, 2]), Err(Error::Lengths { hypotheses: 1, references: 2 }));
        assert_eq!(exact_match(&["a", "b"], &[vec!["a"], vec![]]), Err(Error::NoReference { segment: 2 }));
        assert_eq!(exact_match::<&str, &str>(&[], &[]), Err(Error::Nothing));
    }
}
