//! Definition of a rotary embedding: the rotated elements and the angle per position.
//!
//! Pair `i` of `rotary_dim / 2` rotates by `position · theta^(-2i / rotary_dim)` radians (Su et al. 2021), after
//! scaling. Angles are f64, because an f32 angle of 131,071 radians has an error of 4e-3.

use crate::Result;

/// Maximum rotated elements of a head, far above every model: bounds the list of frequencies.
const MAX_ROTARY_DIM: usize = 1 << 16;

/// The two elements of a head that form pair `i` of the rotated `rotary_dim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RopeStyle {
    /// `i` and `i + rotary_dim / 2` (GPT-NeoX; Llama as Hugging Face stores it).
    #[default]
    Neox,
    /// `2i` and `2i + 1` (GPT-J; Llama as Meta stores it).
    Interleaved,
}

/// Frequency scaling for contexts longer than the training context.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum RopeScaling {
    /// No scaling.
    #[default]
    None,
    /// Divides all frequencies by `factor` (Chen et al. 2023, position interpolation).
    Linear {
        /// Above 0; with 8, 8 times as many positions cover the same angles.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided by `factor`, high ones are kept, and those between are interpolated:
    /// `smooth · f + (1 - smooth) · f / factor` with
    /// `smooth = clamp((original_context · f / 2π - low) / (high - low), 0, 1)`.
    Llama31 {
        /// Above 0; 8 in the published models.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are divided by `factor`; 1 as published.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept; 4 as published.
        high_freq_factor: f64,
        /// The training context; 8192 as published.
        original_context: u32,
    },
    /// YaRN (Peng et al. 2023): pairs that rotate at least `beta_fast` times within the training context are kept, those
    /// that rotate at most `beta_slow` times are divided by `factor`, with a linear ramp over the pair index between.
    /// The paper also scales the logits: see the amplitude of [`CosSinCache::from_frequencies`](super::CosSinCache::from_frequencies).
    Yarn {
        /// Above 0.
        factor: f64,
        /// Rotations; 32 as published.
        beta_fast: f64,
        /// Rotations; 1 as published, below `beta_fast`.
        beta_slow: f64,
        /// The training context, in tokens.
        original_context: u32,
        /// Whether the ends of the ramp are rounded outwards to pair indices, as published.
        truncate: bool,
    },
}

/// A rotary position embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    rotary_dim: usize,
    theta: f64,
    style: RopeStyle,
    scaling: RopeScaling,
}

impl Rope {
    /// Rotates the first `rotary_dim` elements of each head in NeoX style with base `theta` (10,000 in the paper,
    /// 500,000 for Llama 3), unscaled.
    ///
    /// # Errors
    /// When `rotary_dim` is 0, odd or above 65,536, or `theta` is not a finite number above 0.
    pub fn new(rotary_dim: usize, theta: f64) -> Result<Self> {
        crate::ensure!(
            rotary_dim > 0 && rotary_dim.is_multiple_of(2),
            "rope.new",
            "rotary_dim = {rotary_dim} is not an even number above 0"
        );
        crate::ensure!(
            rotary_dim <= MAX_ROTARY_DIM,
            "rope.new",
            "rotary_dim = {rotary_dim} is above {MAX_ROTARY_DIM}"
        );
        check_positive("rope.new", "theta", theta)?;
        Ok(Self { rotary_dim, theta, style: RopeStyle::Neox, scaling: RopeScaling::None })
    }

    /// Replaces the pairing.
    #[must_use]
    pub fn with_style(self, style: RopeStyle) -> Self {
        Self { style, ..self }
    }

    /// Replaces the scaling.
    ///
    /// # Errors
    /// When a factor or the original context is not a finite number above 0, `low_freq_factor` is not below
    /// `high_freq_factor`, or `beta_slow` is not below `beta_fast`; for YaRN also when theta is 1.
    pub fn with_scaling(self, scaling: RopeScaling) -> Result<Self> {
        const OPERATOR: &str = "rope.with_scaling";
        match scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => check_positive(OPERATOR, "factor", factor)?,
            RopeScaling::Llama31 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context,
            } => {
                check_positive(OPERATOR, "factor", factor)?;
                check_positive(OPERATOR, "low_freq_factor", low)?;
                check_positive(OPERATOR, "high_freq_factor", high)?;
                check_positive(OPERATOR, "original_context", f64::from(original_context))?;
                let ordered = low < high;
                crate::ensure!(
                    ordered,
                    OPERATOR,
                    "low_freq_factor = {low} is not below high_freq_factor = {high}"
                );
            }
            RopeScaling::Yarn { factor, beta_fast: fast, beta_slow: slow, original_context, .. } => {
                check_positive(OPERATOR, "factor", factor)?;
                check_positive(OPERATOR, "beta_fast", fast)?;
                check_positive(OPERATOR, "beta_slow", slow)?;
                check_positive(OPERATOR, "original_context", f64::from(original_context))?;
                let (ordered, theta) = (slow < fast, self.theta);
                crate::ensure!(ordered, OPERATOR, "beta_slow = {slow} is not below beta_fast = {fast}");
                crate::ensure!(theta != 1.0, OPERATOR, "theta = 1: all pairs have the same frequency");
            }
        }
        Ok(Self { scaling, ..self })
    }

    /// The number of leading elements of each head that are rotated; the rest are unchanged.
    pub fn rotary_dim(&self) -> usize {
        self.rotary_dim
    }

    /// The pairing of elements.
    pub fn style(&self) -> RopeStyle {
        self.style
    }

    /// Radians per position of each of the `rotary_dim / 2` pairs, scaling included.
    pub fn frequencies(&self) -> Vec<f64> {
        let dim = self.rotary_dim as f64;
        (0..self.rotary_dim / 2).map(|i| self.scale(i, self.theta.powf(-2.0 * i as f64 / dim))).collect()
    }

    fn scale(&self, pair: usize, frequency: f64) -> f64 {
        match self.scaling {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama31 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let waves = f64::from(original_context) * frequency / std::f64::consts::TAU;
                let smooth =
                    ((waves - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                smooth * frequency + (1.0 - smooth) * frequency / factor
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, truncate } => {
                let context = f64::from(original_context);
                let first = self.pair_of(context / beta_fast);
                let last = self.pair_of(context / beta_slow);
                let (first, last) = if truncate { (first.floor(), last.ceil()) } else { (first, last) };
                // the clamps of the paper's code: the last index is compared with elements, not pairs
                let (first, last) = (first.max(0.0), last.min(self.rotary_dim as f64 - 1.0));
                let width = if first == last { 0.001 } else { last - first };
                let interpolated = ((pair as f64 - first) / width).clamp(0.0, 1.0);
                interpolated * frequency / factor + (1.0 - interpolated) * frequency
            }
        }
    }

    /// The (fractional) index of the pair with this wavelength, in tokens, before scaling.
    fn pair_of(&self, wavelength: f64) -> f64 {
        self.rotary_dim as f64 * (wavelength / std::f64::consts::TAU).ln() / (2.0 * self.theta.ln())
    }
}

fn check_positive(operator: &'static str, argument: &str, value: f64) -> Result<()> {
    crate::ensure!(
        value.is_finite() && value > 0.0,
        operator,
        "{argument} = {value} is not a finite number above 0"
    );
    Ok(())
}
