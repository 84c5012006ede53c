//! Signals as bytes: a tag, then the fields in the order of their declaration. Integers are little-endian, texts a
//! length of four bytes and UTF-8, sites a text and two integers of four bytes, what may be missing begins with 0 or 1.
//!
//! Bytes come from outside: whatever they are, [`Signal::decode`] answers with a signal or an error, and takes no more
//! memory than they do.

use super::{Arrival, Signal};
use crate::operation::Collective;
use crate::site::CallSite;

/// No signal is longer than this. Texts that are too long are cut.
pub const FRAME_BYTES_MAX: usize = 64 << 10;

/// Ranks that a signal tells of at most.
const RANKS_TOLD: usize = 24;

/// Two texts and what goes with them are within a frame.
const TEXT_BYTES_MAX: usize = FRAME_BYTES_MAX / 2 - 256;

const COLLECTIVES: [Collective; 6] = [
    Collective::Barrier,
    Collective::Broadcast,
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::AllToAll,
];

/// Bytes that are no signal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadSignal {
    #[error("it ends within its {0}")]
    Short(&'static str),
    #[error("{tag} is no {what}")]
    Tag { what: &'static str, tag: u8 },
    #[error("its {0} is not UTF-8")]
    Text(&'static str),
    #[error("{0} bytes follow its end")]
    Long(usize),
}

impl Signal {
    /// Its bytes, at most [`FRAME_BYTES_MAX`].
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Signal::Failed { rank, reason, site } => {
                bytes.push(0);
                bytes.extend((*rank as u64).to_le_bytes());
                put_text(&mut bytes, reason);
                bytes.push(site.is_some().into());
                site.iter().for_each(|site| put_site(&mut bytes, site));
            }
            Signal::Arrived(arrival) => {
                bytes.push(1);
                put_arrival(&mut bytes, arrival);
            }
            Signal::Waiting { collective, site, missing } => {
                bytes.extend([2, *collective as u8]);
                put_site(&mut bytes, site);
                put_ranks(&mut bytes, missing);
            }
            Signal::Left => bytes.push(3),
            Signal::Told(words) => {
                bytes.push(4);
                put_text(&mut bytes, words);
            }
        }
        bytes
    }

    /// The signal that these bytes are.
    ///
    /// # Errors
    /// [`BadSignal`] if they are none.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadSignal> {
        let mut rest = Rest(bytes);
        let signal = match rest.byte("tag")? {
            0 => {
                let (rank, reason) = (rest.u64("rank")? as usize, rest.text("reason")?);
                let site = match rest.byte("site")? {
                    0 => None,
                    1 => Some(rest.site()?),
                    tag => return Err(BadSignal::Tag { what: "presence of a site", tag }),
                };
                Signal::Failed { rank, reason, site }
            }
            1 => Signal::Arrived(rest.arrival()?),
            2 => {
                let (collective, site) = (rest.collective()?, rest.site()?);
                Signal::Waiting { collective, site, missing: rest.ranks()? }
            }
            3 => Signal::Left,
            4 => Signal::Told(rest.text("words")?),
            tag => return Err(BadSignal::Tag { what: "signal", tag }),
        };
        if rest.0.is_empty() { Ok(signal) } else { Err(BadSignal::Long(rest.0.len())) }
    }
}

fn put_arrival(bytes: &mut Vec<u8>, arrival: &Arrival) {
    bytes.extend(arrival.group.to_le_bytes());
    bytes.extend(arrival.sequence.to_le_bytes());
    bytes.push(arrival.collective as u8);
    bytes.extend(arrival.digest.to_le_bytes());
    bytes.extend(arrival.sent.to_le_bytes());
    bytes.extend(arrival.expected.to_le_bytes());
    put_text(bytes, &arrival.operation);
    put_site(bytes, &arrival.site);
}

/// The first of many ranks are told.
fn put_ranks(bytes: &mut Vec<u8>, ranks: &[usize]) {
    let ranks = &ranks[..ranks.len().min(RANKS_TOLD)];
    bytes.push(ranks.len() as u8);
    ranks.iter().for_each(|&rank| bytes.extend((rank as u64).to_le_bytes()));
}

fn put_site(bytes: &mut Vec<u8>, site: &CallSite) {
    put_text(bytes, &site.file);
    bytes.extend(site.line.to_le_bytes());
    bytes.extend(site.column.to_le_bytes());
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    let text = &text[..text.floor_char_boundary(TEXT_BYTES_MAX)];
    bytes.extend((text.len() as u32).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// What has not been read yet.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn bytes<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], BadSignal> {
        let (head, rest) = self.0.split_first_chunk().ok_or(BadSignal::Short(what))?;
        self.0 = rest;
        Ok(*head)
    }

    fn byte(&mut self, what: &'static str) -> Result<u8, BadSignal> {
        self.bytes(what).map(|[byte]| byte)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, BadSignal> {
        self.bytes(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, BadSignal> {
        self.bytes(what).map(u64::from_le_bytes)
    }

    fn text(&mut self, what: &'static str) -> Result<String, BadSignal> {
        let len = self.u32(what)? as usize;
        let (text, rest) = self.0.split_at_checked(len).ok_or(BadSignal::Short(what))?;
        self.0 = rest;
        Ok(std::str::from_utf8(text).map_err(|_| BadSignal::Text(what))?.to_owned())
    }

    fn collective(&mut self) -> Result<Collective, BadSignal> {
        let tag = self.byte("collective")?;
        COLLECTIVES.get(tag as usize).copied().ok_or(BadSignal::Tag { what: "collective", tag })
    }

    fn ranks(&mut self) -> Result<Vec<usize>, BadSignal> {
        match self.byte("number of ranks")? {
            many if many as usize > RANKS_TOLD => Err(BadSignal::Tag { what: "number of ranks", tag: many }),
            many => (0..many).map(|_| Ok(self.u64("rank")? as usize)).collect(),
        }
    }

    fn site(&mut self) -> Result<CallSite, BadSignal> {
        Ok(CallSite { file: self.text("file")?.into(), line: self.u32("line")?, column: self.u32("column")? })
    }

    fn arrival(&mut self) -> Result<Arrival, BadSignal> {
        Ok(Arrival {
            group: self.u64("group")?,
            sequence: self.u64("sequence")?,
            collective: self.collective()?,
            digest: self.u64("digest")?,
            sent: self.u64("count sent")?,
            expected: self.u64("count expected")?,
            operation: self.text("operation")?,
            site: self.site()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::mix;

    fn site(file: &str) -> CallSite {
        CallSite { file: file.to_owned().into(), line: u32::MAX, column: 7 }
    }

    fn arrival(collective: Collective) -> Arrival {
        Arrival {
            group: u64::MAX,
            sequence: 3,
            collective,
            digest: 0x0123_4567_89ab_cdef,
            sent: 5,
            expected: 6,
            operation: "all_to_all(send [5], receive [6] of f32)".to_owned(),
            site: site("src/ä.rs"),
        }
    }

    fn signals() -> Vec<Signal> {
        let failed = |reason: &str, site| Signal::Failed { rank: 9, reason: reason.to_owned(), site };
        let mut signals = vec![failed("", None), failed("no such file: 'ß'", Some(site(""))), Signal::Left];
        signals.extend(COLLECTIVES.map(|collective| Signal::Arrived(arrival(collective))));
        signals.push(Signal::Told("done; 'ß'".to_owned()));
        signals.extend(COLLECTIVES.map(|collective| Signal::Waiting {
            collective,
            site: site("a.rs"),
            missing: vec![3, 70_000],
        }));
        signals
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        for signal in signals() {
            assert_eq!(Signal::decode(&signal.encode()), Ok(signal));
        }
    }

    #[test]
    fn a_signal_cut_short_or_continued_is_an_error() {
        for signal in signals() {
            let mut bytes = signal.encode();
            for len in 0..bytes.len() {
                assert!(matches!(Signal::decode(&bytes[..len]), Err(BadSignal::Short(_))), "{signal:?} cut at {len}");
            }
            bytes.push(0);
            assert_eq!(Signal::decode(&bytes), Err(BadSignal::Long(1)));
        }
    }

    #[test]
    fn wrong_tags_and_texts_are_named() {
        let error = |bytes: &[u8]| Signal::decode(bytes).unwrap_err().to_string();
        assert_eq!(error(&[5]), "5 is no signal");
        assert_eq!(error(&[2, 6]), "6 is no collective");
        assert_eq!(error(&[2, 0, 1, 0, 0, 0, 0xff]), "its file is not UTF-8");
        assert_eq!(error(&[2, 0, 0xff, 0xff, 0xff, 0xff, 0]), "it ends within its file");
        assert_eq!(error(&[]), "it ends within its tag");
    }

    /// No panic; and what is taken for a signal is one that would be sent so.
    #[test]
    fn any_bytes_are_a_signal_or_an_error() {
        for seed in 0..20_000u64 {
            let signal = &signals()[seed as usize % signals().len()];
            let mut bytes = signal.encode();
            for change in 0..1 + seed % 3 {
                let bits = mix(mix(seed) ^ change);
                let at = (bits >> 8) as usize % bytes.len();
                bytes[at] = bits as u8;
            }
            if let Ok(signal) = Signal::decode(&bytes) {
                assert_eq!(signal.encode(), bytes);
            }
        }
    }

    #[test]
    fn texts_are_cut_to_fit_a_frame() {
        let mut long = arrival(Collective::Barrier);
        (long.operation, long.site) = ("€".repeat(FRAME_BYTES_MAX), site(&"x".repeat(FRAME_BYTES_MAX)));
        let bytes = Signal::Arrived(long).encode();
        assert!(bytes.len() <= FRAME_BYTES_MAX, "{} bytes", bytes.len());
        let Ok(Signal::Arrived(cut)) = Signal::decode(&bytes) else { panic!("cut within a character") };
        assert!(cut.operation.chars().all(|c| c == '€') && cut.operation.len() > TEXT_BYTES_MAX - 3);
    }
}
