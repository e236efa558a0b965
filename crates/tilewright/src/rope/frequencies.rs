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
    /// When a factor or the original context is not a finite number above 0, or `low_freq_factor` is not below
    /// `high_freq_factor`.
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
        (0..self.rotary_dim / 2).map(|i| self.scale(self.theta.powf(-2.0 * i as f64 / dim))).collect()
    }

    fn scale(&self, frequency: f64) -> f64 {
        match self.scaling {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama31 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let waves = f64::from(original_context) * frequency / std::f64::consts::TAU;
                let smooth =
                    ((waves - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                smooth * frequency + (1.0 - smooth) * frequency / factor
            }
        }
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
