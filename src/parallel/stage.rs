//! The stages of ZeRO (Rajbhandari et al. 2020).

/// Of what every holder of a weight keeps its own share alone. Each stage includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Zero {
    #[default]
    Off,
    /// Moments and master.
    Optimizer,
    /// And the gradient.
    Gradients,
    /// And the weight itself.
    Parameters,
}

impl Zero {
    pub const ALL: [Zero; 4] = [Zero::Off, Zero::Optimizer, Zero::Gradients, Zero::Parameters];

    /// The number the stage is known by.
    pub fn stage(self) -> usize {
        self as usize
    }
}
