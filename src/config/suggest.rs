//! What somebody probably meant: the nearest word by the number of slips of the keyboard.

/// The candidate fewest slips away from `word`, if it is near enough to be a slip at all: a third of the
/// word's letters, and at least one. The first of equally near ones wins.
pub(super) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let most = (word.chars().count() / 3).max(1);
    candidates
        .into_iter()
        .map(|candidate| (slips(word, candidate), candidate))
        .filter(|(slips, _)| *slips <= most)
        .min_by_key(|(slips, _)| *slips)
        .map(|(_, candidate)| candidate)
}

/// Letters to insert, delete, replace or swap with their neighbour (optimal string alignment distance);
/// case does not count.
fn slips(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.to_lowercase().chars().collect();
    let b: Vec<char> = b.to_lowercase().chars().collect();
    // rows[i][j]: distance between the first i letters of a and the first j of b.
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1)
            };
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                rows[i][j] = rows[i][j].min(rows[i - 2][j - 2] + 1);
            }
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_counted_once() {
        for (a, b, expected) in [
            ("top_k", "top_k", 0),
            ("topk", "top_k", 1),
            ("tpo_k", "top_k", 1),
            ("Top_K", "top_k", 0),
            ("", "lr", 2),
            ("heads", "layers", 5),
        ] {
            assert_eq!(slips(a, b), expected, "{a} {b}");
        }
    }

    #[test]
    fn a_stranger_is_not_a_slip() {
        let keys = ["experts", "top_k", "lr"];
        assert_eq!(nearest("expert", keys), Some("experts"));
        assert_eq!(nearest("lrr", keys), Some("lr"));
        assert_eq!(nearest("learning_rate", keys), None);
    }
}
