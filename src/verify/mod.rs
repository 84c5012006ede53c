//! Does the mesh matter? A recipe's first steps on one rank, and then in many other ways, which must come to the same.
//!
//! ```text
//!  recipe ──► options: what can be varied ──► layouts: every two values meet (cover), or all combinations, or some
//!                                                │
//!  one rank, all plain ──► run ──► reference     ▼
//!                                     │        run (with a planted bug, if one is wanted: bugs)
//!                                     │          │   collect: reports, gradients, weights as global tensors
//!                                     ▼          ▼
//!                       routing: flips?   compare: to the bit, or as close as the cause allows ──► report
//! ```

mod bugs;
mod check;
mod clusters;
mod collect;
mod compare;
mod cover;
mod dither;
mod error;
mod folder;
mod layouts;
mod noise;
mod options;
mod processes;
mod report;
mod routing;
mod run;
mod search;
mod tensors;

pub use bugs::{BUGS, Bug, find};
pub use compare::Difference;
pub use error::Error;
pub use layouts::SkippedLayout;
pub use options::options;
pub use processes::{TakingPart, layout_file, take_part};
pub use report::{Checked, Comparison, Report, SampleSummary};
pub use search::{Extent, SearchProgress, SearchRequest, check_bug, verify};
