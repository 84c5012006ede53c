//! Weights that are whole only while they are used ([`super::Zero::Parameters`]): the parts of a model in the order of
//! their use, made whole when one's turn comes, one ahead, and let go of after it.
//!
//! ```text
//!  forward    enter 0 | leave 0, enter 1 | leave 1, enter 2 ...        while 0 computes, 1 is gathered
//!  backward   ... enter 1 | leave 1, enter 0 | leave 0                 while 1 computes, 0 is gathered
//! ```
//!
//! A model without such weights has nothing to gather: entering and leaving its units does nothing.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::{Tape, Value};

use super::zero::by_dtype;
use super::{Axis, Gathering, Mesh, Weight, Zero};

/// The units of a model. Clones are handles on the same ones.
#[derive(Clone, Default)]
pub struct Residency(Rc<RefCell<Vec<Unit>>>);

/// Weights that are used together.
struct Unit {
    /// What travels together, with its holders.
    messages: Vec<(Vec<Value>, Arc<dyn Communicator>)>,
    coming: Option<Vec<Gathering>>,
}

impl fmt::Debug for Residency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} units", self.0.borrow().len())
    }
}

impl Residency {
    /// Units so far.
    pub fn len(&self) -> usize {
        self.0.borrow().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The weights that `visit` visits are the next unit. If the mesh says so, shares of them alone are kept from now on;
    /// one may be of several units.
    pub fn add(&self, mesh: &Mesh, visit: impl FnOnce(&mut dyn FnMut(&mut Weight))) {
        let mut of_axes = Vec::<(Axis, Vec<Value>)>::new();
        visit(&mut |weight| {
            let (value, placement) = (weight.parameter.stored(), &weight.placement);
            if mesh.zero() < Zero::Parameters {
                return;
            }
            if !value.is_parted() {
                value.keep_part(mesh.share(placement, value.len()));
            }
            match of_axes.iter_mut().find(|(axis, _)| *axis == placement.holders()) {
                Some((_, values)) => values.push(value.clone()),
                None => of_axes.push((placement.holders(), vec![value.clone()])),
            }
        });
        let on = |(axis, values)| by_dtype(values).map(move |values| (values, mesh.group(axis).clone()));
        self.0.borrow_mut().push(Unit { messages: of_axes.into_iter().flat_map(on).collect(), coming: None });
    }

    /// Runs `f`, which uses the weights of `unit`, here and on the way back, with these whole. Collective.
    ///
    /// # Errors
    /// What the groups report, and what `f` does.
    pub fn within<T, E: From<Error>>(
        &self,
        unit: usize,
        tape: &Tape,
        f: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let here = self.clone();
        tape.on_the_way_back(move || {
            here.leave(unit);
            Ok(())
        });
        self.enter(unit, Some(unit + 1))?;
        let result = f()?;
        self.leave(unit);
        let here = self.clone();
        tape.on_the_way_back(move || Ok(here.enter(unit, unit.checked_sub(1))?));
        Ok(result)
    }

    /// Makes the weights of a unit whole, and starts on those that are needed after it.
    fn enter(&self, unit: usize, after: Option<usize>) -> Result<(), Error> {
        let mut units = self.0.borrow_mut();
        units[unit].ask()?;
        let mut coming = units[unit].coming.take().into_iter().flatten();
        coming.try_for_each(Gathering::finish)?;
        match after.and_then(|after| units.get_mut(after)) {
            Some(after) => after.ask(),
            None => Ok(()),
        }
    }

    fn leave(&self, unit: usize) {
        let units = self.0.borrow();
        units[unit].messages.iter().flat_map(|(values, _)| values).for_each(Value::release);
    }
}

impl Unit {
    /// Starts to gather, unless that is done already.
    fn ask(&mut self) -> Result<(), Error> {
        if self.coming.is_none() {
            let start =
                |(values, holders): &(Vec<Value>, Arc<dyn Communicator>)| Gathering::start(values.clone(), holders);
            self.coming = Some(self.messages.iter().map(start).collect::<Result<_, _>>()?);
        }
        Ok(())
    }
}
