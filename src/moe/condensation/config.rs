//! What the `moe.condense` keys of a recipe say.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{ClusterPolicy, ClusterRule, Threshold};
use crate::moe::Config;

/// `moe.condense`: where the threshold comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Condense {
    /// No condensation.
    #[default]
    Off,
    /// `moe.condense_threshold`.
    Static,
    /// The formula printed in the paper.
    Paper,
    /// From the first value of `moe.condense_range` towards the second, following the loss.
    Adaptive,
}

impl Condense {
    /// The value of the key.
    pub fn name(self) -> &'static str {
        match self {
            Condense::Off => "off",
            Condense::Static => "static",
            Condense::Paper => "paper",
            Condense::Adaptive => "adaptive",
        }
    }
}

/// `moe.condense_gradient`: which tokens receive the gradient of a shared row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CondenseGradient {
    /// Each token of the cluster receives an equal share.
    #[default]
    Spread,
    /// The representative alone receives it, as automatic differentiation of the substitution says.
    Literal,
}

/// Why tokens that compete for experts cannot share rows.
pub const ROWS_COMPETE: &str = "tokens compete for experts, so that the expert of a row depends on other rows: similar \
                                rows need not stand for each other";

/// How tokens are condensed.
#[derive(Clone, Debug)]
pub struct Condensation {
    pub threshold: Threshold,
    pub gradient: CondenseGradient,
    /// Number of consecutive tokens of the step that form a group; `None`: a sequence.
    pub tokens: Option<usize>,
    /// `None`: by whether the stack is causal ([`ClusterRule::of_stack`]).
    pub policy: Option<Arc<dyn ClusterPolicy>>,
    /// Most routes that are compared with each other; more of one group and expert are compared in parts.
    pub most: usize,
    /// `[S1, S2]`: pairs that were more similar than S1 in the layer before count as equal, and pairs that were less
    /// similar than S2 as different, without a comparison. `None`: all pairs are compared.
    pub history: Option<[f64; 2]>,
}

impl Config {
    /// How tokens are condensed, if they are.
    ///
    /// # Panics
    /// If a range has other than two numbers: configuration has been checked before.
    pub fn condensation(&self) -> Option<Condensation> {
        let two =
            |numbers: &[f64]| <[f64; 2]>::try_from(numbers).expect("two numbers: configuration is checked before");
        let threshold = match self.condense {
            Condense::Off => return None,
            Condense::Static => Threshold::Static(self.condense_threshold),
            Condense::Paper => Threshold::Paper,
            Condense::Adaptive => {
                let ([start, end], warmup) = (two(&self.condense_range), self.condense_warmup);
                Threshold::Adaptive { start, end, slope: self.condense_slope, warmup }
            }
        };
        Some(Condensation {
            threshold,
            gradient: self.condense_gradient,
            tokens: self.condense_tokens,
            policy: self.condense_clusters.map(|rule| Arc::new(rule) as Arc<dyn ClusterPolicy>),
            most: self.condense_compared,
            history: self.condense_history.as_deref().map(two),
        })
    }

    /// Whether similar tokens share rows.
    pub fn condenses(&self) -> bool {
        self.condense != Condense::Off
    }

    /// Whether the threshold is that of the recipe.
    pub fn has_fixed_threshold(&self) -> bool {
        self.condense == Condense::Static
    }

    /// Whether the threshold moves between two of the recipe.
    pub fn has_adaptive_threshold(&self) -> bool {
        self.condense == Condense::Adaptive
    }

    /// Whether a token may be represented by a later one, if the model is causal.
    pub fn looks_ahead(&self) -> bool {
        self.condense_clusters == Some(ClusterRule::Star)
    }
}
