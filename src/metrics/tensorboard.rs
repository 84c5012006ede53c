//! TensorBoard's event files: the scalars of every step, and the load of experts as histograms.
//!
//! A file is a sequence of TFRecords: a length of 8 bytes, its checksum, the record, its checksum, all little-endian; the
//! checksums are CRC-32C, masked. A record is a protocol buffer, `tensorflow.Event`. Both formats are TensorFlow's
//! (`tensorflow/core/lib/io/record_writer.h`, `tensorflow/core/util/event.proto`, `summary.proto`), of which this is what
//! scalars and histograms need.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::append::Appender;
use super::{Error, MoeRecord, StepRecord, TaskRecord};

/// Name of the folder of event files in a run folder.
pub const TENSORBOARD_FOLDER: &str = "tensorboard";

/// Writes the numbers of steps to a file of their own for every start of a run.
#[derive(Debug)]
pub struct EventWriter {
    file: Appender,
}

impl EventWriter {
    /// Starts a file in the folder `run`, of a run that has done `done` steps. TensorBoard forgets later steps of earlier
    /// files.
    ///
    /// # Errors
    /// A folder or a file that cannot be made.
    pub fn create(run: &Path, done: u64) -> Result<EventWriter, Error> {
        let folder = run.join(TENSORBOARD_FOLDER);
        fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
        let now = since_1970();
        // TensorBoard reads files in the order of their names, which begin with the second of their making.
        let name = |number: u32| format!("events.out.tfevents.{:010}.{number}.guildhall", now.as_secs());
        let path = (0..).map(|number| folder.join(name(number))).find(|path| !path.exists());
        let mut file = Appender::create(&path.expect("numbers do not end"))?;
        file.push(&record(&event(now, 0, version())));
        if done > 0 {
            file.push(&record(&event(now, done + 1, session_start())));
        }
        file.catch_up()?;
        Ok(EventWriter { file })
    }

    /// Appends the numbers of a step, and those that could not be written before.
    ///
    /// # Errors
    /// A file that cannot be written: the numbers are kept.
    pub fn write(&mut self, step: &StepRecord) -> Result<(), Error> {
        self.file.push(&record(&event(since_1970(), step.step, summary(values(step)))));
        self.catch_up()
    }

    /// Writes what could not be written before.
    ///
    /// # Errors
    /// As [`EventWriter::write`].
    pub fn catch_up(&mut self) -> Result<(), Error> {
        self.file.catch_up()
    }
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// `tensorflow.Event` with what it tells.
fn event(now: Duration, step: u64, what: ProtoMessage) -> ProtoMessage {
    ProtoMessage::default().double(1, now.as_secs_f64()).whole(2, step).then(&what)
}

/// The first event of every file.
fn version() -> ProtoMessage {
    ProtoMessage::default().text(3, "brain.Event:2")
}

/// Events of this step and later ones in earlier files are of no account.
fn session_start() -> ProtoMessage {
    const START: u64 = 1;
    ProtoMessage::default().message(7, &ProtoMessage::default().whole(1, START))
}

/// `tensorflow.Summary`.
fn summary(values: impl IntoIterator<Item = ProtoMessage>) -> ProtoMessage {
    let all = values.into_iter().fold(ProtoMessage::default(), |all, value| all.message(1, &value));
    ProtoMessage::default().message(5, &all)
}

fn values(step: &StepRecord) -> impl Iterator<Item = ProtoMessage> {
    let loads = step.moe.iter().map(|layer| load(layer.layer, &layer.load));
    scalars(step).into_iter().map(|(tag, number)| scalar(&tag, number)).chain(loads)
}

fn scalar(tag: &str, number: f64) -> ProtoMessage {
    ProtoMessage::default().text(1, tag).float(2, number as f32)
}

fn load(layer: usize, routes: &[u64]) -> ProtoMessage {
    ProtoMessage::default().text(1, &format!("moe/layer {layer}/load")).message(5, &histogram(routes))
}

fn scalars(step: &StepRecord) -> Vec<(String, f64)> {
    let named = |name: &str, number: f64| (name.to_owned(), number);
    let mut all = vec![
        named("train/loss", step.loss),
        named("train/balance_loss", step.balance_loss),
        named("train/z_loss", step.z_loss),
        named("train/grad_norm", step.grad_norm),
        named("train/lr", step.lr),
        named("train/tokens", step.tokens as f64),
        named("train/tokens_per_s", step.tokens_per_s),
    ];
    all.extend(step.eval_loss.map(|loss| named("eval/loss", loss)));
    all.extend(step.condense_threshold.map(|cosine| named("train/condense_threshold", cosine)));
    all.extend(step.tasks.iter().filter_map(|part| of_part("train", part)));
    all.extend(step.eval_tasks.iter().filter_map(|part| of_part("eval", part)));
    all.extend(step.moe.iter().flat_map(of_layer));
    all
}

fn of_part(phase: &str, part: &TaskRecord) -> Option<(String, f64)> {
    Some((format!("{phase}/{}/{} to {}/loss", part.task, part.from, part.to), part.loss?))
}

fn of_layer(layer: &MoeRecord) -> Vec<(String, f64)> {
    let named = |name: &str, number: f64| (format!("moe/layer {}/{name}", layer.layer), number);
    let mut all = vec![
        named("entropy", layer.entropy),
        named("drop_rate", layer.drop_rate),
        named("dead_experts", layer.dead.len() as f64),
    ];
    all.extend(layer.condensed.iter().map(|condensed| named("uncomputed_share", condensed.uncomputed_share)));
    all
}

/// `tensorflow.HistogramProto`: expert e is the bucket from e to e + 1, with its routes.
fn histogram(load: &[u64]) -> ProtoMessage {
    let mut sums = [0.0; 3];
    for (expert, &routes) in load.iter().enumerate() {
        let (middle, routes) = (expert as f64 + 0.5, routes as f64);
        sums = [sums[0] + routes, sums[1] + routes * middle, sums[2] + routes * middle * middle];
    }
    let limits: Vec<f64> = (1..=load.len()).map(|limit| limit as f64).collect();
    let counts: Vec<f64> = load.iter().map(|&routes| routes as f64).collect();
    let bounds = ProtoMessage::default().double(1, 0.0).double(2, load.len() as f64);
    bounds.double(3, sums[0]).double(4, sums[1]).double(5, sums[2]).doubles(6, &limits).doubles(7, &counts)
}

/// A protocol buffer under construction.
#[derive(Default)]
struct ProtoMessage(Vec<u8>);

impl ProtoMessage {
    /// Zero is what a field has that is absent.
    fn whole(self, field: u8, value: u64) -> ProtoMessage {
        if value == 0 { self } else { self.key(field, 0).varint(value) }
    }

    fn double(self, field: u8, value: f64) -> ProtoMessage {
        if value == 0.0 {
            return self;
        }
        self.key(field, 1).then(&ProtoMessage(value.to_le_bytes().to_vec()))
    }

    fn float(self, field: u8, value: f32) -> ProtoMessage {
        self.key(field, 5).then(&ProtoMessage(value.to_le_bytes().to_vec()))
    }

    fn text(self, field: u8, value: &str) -> ProtoMessage {
        self.message(field, &ProtoMessage(value.as_bytes().to_vec()))
    }

    fn doubles(self, field: u8, values: &[f64]) -> ProtoMessage {
        self.message(field, &ProtoMessage(values.iter().flat_map(|value| value.to_le_bytes()).collect()))
    }

    fn message(self, field: u8, value: &ProtoMessage) -> ProtoMessage {
        self.key(field, 2).varint(value.0.len() as u64).then(value)
    }

    /// All fields here are below 16, whose keys are one byte.
    fn key(mut self, field: u8, wire_type: u8) -> ProtoMessage {
        self.0.push(field << 3 | wire_type);
        self
    }

    fn varint(mut self, mut value: u64) -> ProtoMessage {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
        self
    }

    fn then(mut self, more: &ProtoMessage) -> ProtoMessage {
        self.0.extend_from_slice(&more.0);
        self
    }
}

/// A TFRecord.
fn record(message: &ProtoMessage) -> Vec<u8> {
    let length = (message.0.len() as u64).to_le_bytes();
    let mut bytes = length.to_vec();
    bytes.extend(masked_crc(&length).to_le_bytes());
    bytes.extend(&message.0);
    bytes.extend(masked_crc(&message.0).to_le_bytes());
    bytes
}

/// The mask keeps checksums of checksums apart.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of TensorBoard's own classes, by `oracle/events_record.py`.
    #[test]
    fn records_are_tensorboards() {
        let golden = include_bytes!("../../oracle/golden/events.tfrecord");
        let values = [scalar("train/loss", 2.5), load(1, &[5, 0, 3])];
        let events = [
            event(Duration::from_millis(1500), 0, version()),
            event(Duration::from_millis(2250), 301, session_start()),
            event(Duration::from_secs(1_000_000_000), 300, summary(values)),
        ];
        assert_eq!(events.iter().flat_map(record).collect::<Vec<u8>>(), golden);
    }
}
