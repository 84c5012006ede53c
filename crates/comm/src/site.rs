//! A line of a program, which may be another process's.

use std::borrow::Cow;
use std::fmt;
use std::panic::Location;

/// Where an operation was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallSite {
    pub file: Cow<'static, str>,
    pub line: u32,
    pub column: u32,
}

impl From<&'static Location<'static>> for CallSite {
    fn from(location: &'static Location<'static>) -> Self {
        CallSite { file: location.file().into(), line: location.line(), column: location.column() }
    }
}

impl fmt::Display for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}
