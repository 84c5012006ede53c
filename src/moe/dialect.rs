//! What `moe.dialect` means: how the chosen are weighted, and which loss keeps experts busy (`docs/gates.md`).

use super::gates::BalanceKind;
use super::{BalanceScope, Config, Dialect, Weighting};

impl Dialect {
    pub(super) fn weighting(self) -> Weighting {
        match self {
            Dialect::Hf => Weighting::Normalised,
            Dialect::Megatron | Dialect::Fastmoe => Weighting::AmongChosen,
            Dialect::Deepseek => Weighting::Probability,
        }
    }
}

impl Config {
    /// The dialect, if the gate asks it for anything.
    pub fn spoken(&self) -> Option<Dialect> {
        self.dialect.filter(|dialect| self.gate().heeds(*dialect))
    }

    /// Within what loads are compared.
    pub fn scope(&self) -> BalanceScope {
        let own = match self.spoken() {
            None | Some(Dialect::Deepseek) => BalanceScope::Sequence,
            Some(Dialect::Hf | Dialect::Megatron | Dialect::Fastmoe) => BalanceScope::MicroBatch,
        };
        // Noise has losses of its own, in whatever dialect its choices are weighed.
        let own = if self.has_own_losses() { BalanceScope::Sequence } else { own };
        self.balance_scope.unwrap_or(own)
    }

    /// Which loss keeps experts busy.
    pub fn balance(&self) -> BalanceKind {
        match (self.gate().balance(), self.spoken()) {
            (BalanceKind::ImportanceAndLoad, _) => BalanceKind::ImportanceAndLoad,
            (own, None) => own,
            (_, Some(Dialect::Hf)) => BalanceKind::AllLayers,
            (_, Some(Dialect::Megatron | Dialect::Deepseek)) => BalanceKind::AllChoices,
            (_, Some(Dialect::Fastmoe)) => BalanceKind::FirstChoices,
        }
    }

    /// Whether the losses are of importance and noise, in every dialect, and not of loads.
    pub fn has_own_losses(&self) -> bool {
        self.gate().balance() == BalanceKind::ImportanceAndLoad
    }

    /// Whether one balance loss is over all layers.
    pub fn joins_layers(&self) -> bool {
        self.balance() == BalanceKind::AllLayers
    }

    /// Whether auxiliary losses look at all tokens and take a row for a sequence, as the systems do whose dialect is spoken.
    pub fn counts_rows(&self) -> bool {
        self.spoken().is_some() && !self.has_own_losses()
    }
}
