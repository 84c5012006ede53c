//! Communicators around communicators: each changes one thing and passes the rest on.

mod agreement;
pub(crate) mod bytes;
mod carried;
mod delay;
mod fault;
pub(crate) mod relay;
mod trace;

use std::sync::Arc;

use crate::error::Error;
use crate::operation::{Request, Summation};
use crate::pending::Pending;
use crate::{Communicator, DeviceCarriers, OnLongWait};

pub use agreement::{Agreement, Patience};
pub use bytes::Wired;
pub use carried::{Carried, OnHost};
pub use delay::{Delay, Link, Network};
pub use fault::{Death, Fault, Faults};
pub use relay::{NodeWay, Relay};
pub use trace::{Ledger, Trace, Traffic};

/// A communicator that is another with something changed; the defaults change nothing.
pub trait Wrapper: Send + Sync {
    /// What is wrapped.
    fn inner(&self) -> &Arc<dyn Communicator>;

    /// The same change to a communicator that comes from the wrapped one.
    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator>;

    /// [`Communicator::start`].
    ///
    /// # Errors
    /// As there; so for all that follow.
    fn start(&self, request: Request) -> Result<Pending, Error> {
        self.inner().start(request)
    }

    /// [`Communicator::split`].
    ///
    /// # Errors
    /// As [`Wrapper::start`].
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        Ok(self.around(self.inner().split(color, key)?))
    }

    /// [`Communicator::duplicate`].
    ///
    /// # Errors
    /// As [`Wrapper::start`].
    fn duplicate(&self) -> Result<Arc<dyn Communicator>, Error> {
        Ok(self.around(self.inner().duplicate()?))
    }

    /// [`Communicator::moves_devices`].
    fn moves_devices(&self) -> bool {
        self.inner().moves_devices()
    }

    /// [`Communicator::carry_by`].
    ///
    /// # Errors
    /// As [`Wrapper::start`].
    fn carry_by(&self, carriers: Option<Arc<dyn DeviceCarriers>>) -> Result<bool, Error> {
        self.inner().carry_by(carriers)
    }

    /// [`Communicator::abort`].
    fn abort(&self, reason: &str) {
        self.inner().abort(reason);
    }
}

impl<W: Wrapper> Communicator for W {
    fn rank(&self) -> usize {
        self.inner().rank()
    }

    fn size(&self) -> usize {
        self.inner().size()
    }

    fn name(&self) -> &str {
        self.inner().name()
    }

    fn named(&self, name: &str) -> Arc<dyn Communicator> {
        self.around(self.inner().named(name))
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        Wrapper::start(self, request)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        Wrapper::split(self, color, key)
    }

    fn duplicate(&self) -> Result<Arc<dyn Communicator>, Error> {
        Wrapper::duplicate(self)
    }

    fn moves_devices(&self) -> bool {
        Wrapper::moves_devices(self)
    }

    fn carry_by(&self, carriers: Option<Arc<dyn DeviceCarriers>>) -> Result<bool, Error> {
        Wrapper::carry_by(self, carriers)
    }

    fn sums(&self) -> Summation {
        self.inner().sums()
    }

    fn abort(&self, reason: &str) {
        Wrapper::abort(self, reason);
    }

    fn on_long_wait(&self, tell: OnLongWait) {
        self.inner().on_long_wait(tell);
    }
}
