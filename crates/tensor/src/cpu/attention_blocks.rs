//! Attention's blocks of queries and keys, and which of a block's queries see which of its keys.

use std::ops::Range;

use crate::cpu::attention_call::AttentionSizes;

/// Queries and keys of a block. Each product packs its factors, so larger blocks pack a row less often. Queries that see no key
/// of a block are left out of it; of those that see one, the scores of all its keys are computed.
#[derive(Clone, Copy)]
pub(super) struct BlockSizes {
    pub(super) queries: usize,
    pub(super) keys: usize,
}

impl BlockSizes {
    pub(super) fn of(shape: AttentionSizes) -> BlockSizes {
        let keys = if shape.key_seq >= 2048 { 128 } else { 64 };
        BlockSizes { queries: shape.seq.clamp(1, 256), keys: shape.key_seq.clamp(1, keys) }
    }
}

/// Keys of a row, and the queries of the same row that see any of them; of a block of each.
pub(super) struct AttentionBlock<'a> {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
    /// What its queries see.
    seen: &'a [[u32; 2]],
}

impl AttentionBlock<'_> {
    pub(super) fn sizes(&self) -> [usize; 2] {
        [self.queries.len(), self.keys.len()]
    }

    /// Which of its keys a query sees, counted from the first of each.
    #[inline(always)]
    pub(super) fn keys_of(&self, query: usize) -> Range<usize> {
        let [from, to] =
            self.seen[query].map(|key| (key as usize).saturating_sub(self.keys.start).min(self.keys.len()));
        from..to.max(from)
    }

    /// Which of its queries see a key, counted likewise: bounds never fall.
    #[inline(always)]
    pub(super) fn queries_of(&self, key: usize) -> Range<usize> {
        let key = (self.keys.start + key) as u32;
        let from = self.seen.partition_point(|&[_, end]| end <= key);
        from..self.seen.partition_point(|&[start, _]| start <= key).max(from)
    }

    /// Whether each of its queries sees all of its keys.
    pub(super) fn is_whole(&self) -> bool {
        let (first, last) = (self.seen[0], self.seen[self.seen.len() - 1]);
        last[0] as usize <= self.keys.start && first[1] as usize >= self.keys.end
    }
}

/// The blocks that some of these queries of a row see keys of; `seen` is of all queries of the row.
pub(super) fn blocks(
    seen: &[[u32; 2]],
    queries: Range<usize>,
    keys: usize,
    key_seq: usize,
) -> impl Iterator<Item = AttentionBlock<'_>> {
    let some = &seen[queries.clone()];
    // Bounds never fall, so the first query sees the earliest key of all, and the last query the latest.
    let (first, end) = (some[0][0] as usize, some[some.len() - 1][1] as usize);
    (first / keys * keys..end).step_by(keys).filter_map(move |j| {
        let keys = j..key_seq.min(j + keys);
        let from = some.partition_point(|&[_, end]| end as usize <= keys.start);
        let to = some.partition_point(|&[start, _]| (start as usize) < keys.end);
        let seen = some.get(from..to).filter(|seen| !seen.is_empty())?;
        Some(AttentionBlock { queries: queries.start + from..queries.start + to, keys, seen })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{causal_keys, cross_keys, segment_keys, within_window};

    /// Every key that a query sees is in one block with it, and both sides of a block know the same of it.
    #[test]
    fn blocks_hold_what_is_seen() {
        for lengths in [&[258][..], &[65, 193], &[64, 64, 1, 3], &[1, 130, 127, 2]] {
            let segments: Vec<u32> = (0u32..).zip(lengths).flat_map(|(segment, &len)| vec![segment; len]).collect();
            let seq = segments.len();
            let causal = causal_keys(&segments, seq);
            // Another text, without the second segment and with more of the others.
            let more: Vec<u32> =
                (0..).zip(lengths).flat_map(|(s, &len)| vec![s; if s == 1 { 0 } else { len + 9 }]).collect();
            let other = cross_keys((&segments, seq), (&more, more.len()));
            let same = [within_window(causal.clone(), seq, 70), segment_keys(&segments, seq), causal];
            for (keys, key_seq) in same.map(|keys| (keys, seq)).into_iter().chain([(other, more.len())]) {
                let seen: Vec<[u32; 2]> = keys.iter().map(|keys| [keys.start, keys.end]).collect();
                let mut found = vec![0; seq * key_seq];
                for first in (0..seq).step_by(256) {
                    for block in blocks(&seen, first..seq.min(first + 256), 64, key_seq) {
                        let [queries, keys] = block.sizes();
                        let pairs = (0..queries).flat_map(|query| (0..keys).map(move |key| (query, key)));
                        let seen: Vec<_> = pairs.filter(|&(query, key)| block.keys_of(query).contains(&key)).collect();
                        let same = |&(query, key): &(usize, usize)| block.queries_of(key).contains(&query);
                        assert!(seen.iter().all(same));
                        assert_eq!((0..keys).map(|key| block.queries_of(key).len()).sum::<usize>(), seen.len());
                        assert_eq!(block.is_whole(), seen.len() == queries * keys);
                        let at = |(query, key)| (block.queries.start + query) * key_seq + block.keys.start + key;
                        seen.into_iter().for_each(|pair| found[at(pair)] += 1);
                    }
                }
                let want =
                    (0..seq * key_seq).map(|at| usize::from(keys[at / key_seq].contains(&((at % key_seq) as u32))));
                assert!(found.into_iter().eq(want), "{lengths:?}");
            }
        }
    }
}
