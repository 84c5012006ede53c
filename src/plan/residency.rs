//! Weights that are whole only while they are used, of sizes: as `src/parallel/residency.rs` has them.

use std::cell::RefCell;
use std::rc::Rc;

use guildhall_tensor::{Cause, Dtype};

use super::books::Books;
use super::model::Weight;
use super::moves::Group;
use super::sketch::Array;
use super::tape::Tape;

/// The parts of a model in the order of their use. Clones share them. Empty where weights are always whole.
#[derive(Clone, Default)]
pub(super) struct Residency(Rc<RefCell<Vec<Unit>>>);

struct Unit {
    books: Rc<Books>,
    messages: Vec<Message>,
    /// Under way: of every message what is sent and what arrives.
    coming: Vec<[Array; 2]>,
    whole: Vec<Array>,
}

/// Weights of one group and storage.
struct Message {
    group: Group,
    dtype: Dtype,
    lengths: Vec<u64>,
}

impl Residency {
    /// Adds the part of a model that has these weights.
    pub(super) fn add(&self, books: &Rc<Books>, weights: &[Weight], group: impl Fn(&Weight) -> Group) {
        let mut messages = Vec::<Message>::new();
        for weight in weights {
            let (group, dtype, len) = (group(weight), weight.value.dtype, weight.value.len());
            match messages.iter_mut().find(|message| (message.group, message.dtype) == (group, dtype)) {
                Some(message) => message.lengths.push(len),
                None => messages.push(Message { group, dtype, lengths: vec![len] }),
            }
        }
        let (coming, whole) = (Vec::new(), Vec::new());
        self.0.borrow_mut().push(Unit { books: books.clone(), messages, coming, whole });
    }

    /// Runs `f` while the weights of a unit are whole, there and on the way back.
    pub(super) fn within<T>(&self, unit: usize, tape: &Tape, f: impl FnOnce() -> T) -> T {
        let here = self.clone();
        tape.on_the_way_back(move || here.leave(unit));
        self.enter(unit, Some(unit + 1));
        let result = f();
        self.leave(unit);
        let here = self.clone();
        tape.on_the_way_back(move || here.enter(unit, unit.checked_sub(1)));
        result
    }

    fn enter(&self, unit: usize, after: Option<usize>) {
        let mut units = self.0.borrow_mut();
        let Some(entered) = units.get_mut(unit) else { return };
        entered.ask();
        entered.arrive();
        if let Some(after) = after.and_then(|after| units.get_mut(after)) {
            after.ask();
        }
    }

    fn leave(&self, unit: usize) {
        if let Some(unit) = self.0.borrow_mut().get_mut(unit) {
            unit.whole.clear();
        }
    }
}

impl Unit {
    fn parameters(&self, len: u64, dtype: Dtype) -> Array {
        Array::new(&self.books, Cause::Parameters, (1, len), dtype)
    }

    fn ask(&mut self) {
        if !self.coming.is_empty() {
            return;
        }
        let start = |message: &Message| {
            let own = message.lengths.iter().map(|&len| message.group.share(len)).sum();
            let all = message.lengths.iter().sum();
            let [own, all] = [own, all].map(|len| self.parameters(len, message.dtype));
            message.group.all_gather_ahead(&self.books, own.bytes());
            [own, all]
        };
        self.coming = self.messages.iter().map(start).collect();
    }

    fn arrive(&mut self) {
        for ([_, all], message) in std::mem::take(&mut self.coming).into_iter().zip(&self.messages) {
            match &message.lengths[..] {
                [_] => self.whole.push(all),
                lengths => {
                    let whole: Vec<Array> = lengths.iter().map(|&len| self.parameters(len, message.dtype)).collect();
                    self.whole.extend(whole);
                }
            }
        }
    }
}
