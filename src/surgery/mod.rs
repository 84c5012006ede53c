//! Surgery: one checkpoint becomes another model.
//!
//! ```text
//!  dense checkpoint -> Model -> moefy -> Model with experts -> checkpoint
//!                                   |
//!                                   +- copies of the feed-forward behind new routers, or narrower new experts
//! ```

mod checkpoint;
mod error;
mod moefy;

pub use checkpoint::Moefy;
pub use error::Error;
pub use moefy::moefy;
