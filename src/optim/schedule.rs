//! The learning rate of a step: linear warm-up, then a shape.

/// What the rate does after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    Constant,
    Linear,
    Cosine,
    InverseSqrt,
}

/// A learning-rate schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    pub peak: f64,
    pub decay: Decay,
    pub warmup_steps: u64,
    /// The last step of `Linear` and `Cosine`.
    pub steps: u64,
    /// The rate at that step, as a fraction of the peak.
    pub end: f64,
}

impl LearningRate {
    /// The rate of `step`, counted from 1. `InverseSqrt` is `peak * sqrt(warmup / step)`, with a warm-up of at least 1.
    pub fn at(&self, step: u64) -> f64 {
        if step <= self.warmup_steps {
            return self.peak * step as f64 / self.warmup_steps as f64;
        }
        let span = self.steps.saturating_sub(self.warmup_steps).max(1) as f64;
        let progress = ((step - self.warmup_steps) as f64 / span).min(1.0);
        let between = |share: f64| self.peak * (self.end + (1.0 - self.end) * share);
        match self.decay {
            Decay::Constant => self.peak,
            Decay::Linear => between(1.0 - progress),
            Decay::Cosine => between(0.5 * (1.0 + (std::f64::consts::PI * progress).cos())),
            Decay::InverseSqrt => self.peak * (self.warmup_steps.max(1) as f64 / step as f64).sqrt(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_rise_then_fall_to_their_end() {
        let rate = |decay, step| LearningRate { peak: 1.0, decay, warmup_steps: 10, steps: 110, end: 0.1 }.at(step);
        for decay in [Decay::Constant, Decay::Linear, Decay::Cosine, Decay::InverseSqrt] {
            assert_eq!(rate(decay, 5), 0.5);
            assert_eq!(rate(decay, 10), 1.0);
        }
        assert_eq!(rate(Decay::Constant, 1000), 1.0);
        assert!((rate(Decay::Linear, 60) - 0.55).abs() < 1e-12 && (rate(Decay::Linear, 110) - 0.1).abs() < 1e-12);
        assert!((rate(Decay::Cosine, 60) - 0.55).abs() < 1e-12 && (rate(Decay::Cosine, 500) - 0.1).abs() < 1e-12);
        assert_eq!(rate(Decay::InverseSqrt, 40), 0.5);
    }
}
