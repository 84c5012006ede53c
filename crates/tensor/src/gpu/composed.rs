//! The lines of the table that are marked `as composed`: functions of their names, which launch what the line is made of.
//! What passes from one launch to the next lies in memory that the account does not see.

pub(crate) use super::attention::*;
pub(crate) use super::indexed::*;
pub(crate) use super::products::*;
pub(crate) use super::sums::*;
