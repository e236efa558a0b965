//! Gated activations: `out = act(x[.., ..d]) · x[.., d..]`, computed in f32 and rounded once.
//!
//! Shapes: x `[tokens, 2 d]`, out `[tokens, d]`, any token stride; each f32, f16 or bf16. Sizes are launch
//! parameters. The relative error is about 2^-21 for f32 results, and a few times 2^-20 for 16-bit results, which use
//! a faster formula.

use crate::tile::{Chunk, Strided, chunk};
use std::f64::consts::LOG2_E;
use tilewright::Dtype;
use tilewright_ptx::{Access, Arg, Builder, Invalid, Kernel, Value};

const THREADS: u32 = 128;
/// Chunks of gates per thread; equally many chunks of factors.
const CHUNKS_PER_THREAD: u32 = 2;

/// Maximum `d`: the second dimension of a grid is limited to 2^16 - 1 CTAs.
pub const MAX_D: u32 = 0xffff * CHUNKS_PER_THREAD * THREADS;

pub use tilewright::activation::Activation;

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ActivationConfig {
    /// Activation function of the gate.
    pub activation: Activation,
    /// Dtypes of x and of the result.
    pub dtypes: (Dtype, Dtype),
    /// Elements per load: 1, or `chunk::max_width` of both dtypes.
    pub width: u32,
}

crate::params! {
    /// Parameters of one launch.
    #[derive(Debug, Clone, Copy)]
    pub struct ActivationParams => ActivationRegs(this, config: ActivationConfig) {
        /// Activation function of the gate.
        host activation: Activation,
        /// Dtypes of x and of the result.
        host dtypes: (Dtype, Dtype),
        /// `[tokens, d]`
        host shape: [u32; 2],
        /// Gates and factors.
        x: Strided[config.dtypes.0],
        /// The result.
        out: Strided[config.dtypes.1],
        d: u32 = this.shape[1], chunks: u32 = this.shape[1] / config.width,
    }
}

impl ActivationParams {
    /// Configuration of the kernel for this launch.
    pub fn config(&self) -> ActivationConfig {
        let ((x_dtype, out_dtype), d) = (self.dtypes, u64::from(self.shape[1]));
        let elements = [self.x.alignment(x_dtype), self.out.alignment(out_dtype)].concat();
        let width = chunk::width(&[x_dtype, out_dtype], elements.into_iter().chain([d]));
        ActivationConfig { activation: self.activation, dtypes: self.dtypes, width }
    }

    /// Grid and arguments for [`ActivationParams::config`]. Requires at least one element and `d` of at most
    /// [`MAX_D`].
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        let ([tokens, d], config) = (self.shape, self.config());
        ([tokens, (d / config.width).div_ceil(CHUNKS_PER_THREAD * THREADS), 1], self.args(config))
    }
}

impl ActivationConfig {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        let activation = match self.activation {
            Activation::Silu => "silu",
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu_tanh",
        };
        let (x, out) = self.dtypes;
        let to = if out == x { String::new() } else { format!("_to_{out}") };
        format!("{activation}_and_mul_{x}{to}_{}", self.width)
    }
}

/// Records the kernel of a configuration. Its parameters are those of [`ActivationParams::launch`].
///
/// # Errors
/// None for a configuration from [`ActivationParams::config`].
pub fn act_and_mul(name: &str, config: ActivationConfig) -> Result<Kernel, Invalid> {
    let (out_dtype, width) = (config.dtypes.1, config.width);
    Builder::dependent_kernel(name, THREADS, |k| {
        let ActivationRegs { x, out, d, chunks } = ActivationRegs::declare(k, config);
        let (x, out) = (x.row(k.cta(), k.constant(0)), out.row(k.cta(), k.constant(0)));
        let first = (k.cta_y() * (THREADS * CHUNKS_PER_THREAD) + k.thread()).named("chunk");
        let (gates, out) = (x.at(first * width), out.at(first * width));
        let factors = gates.at(d);
        let load = |i| {
            let in_bounds = (first + i * THREADS).lt(chunks);
            let [gates, factors] = [gates, factors]
                .map(|from| from.plus(i * THREADS * width).load_when(in_bounds, width, Access::Streaming));
            (i, in_bounds, gates, factors)
        };
        for (i, in_bounds, gates, factors) in (0..CHUNKS_PER_THREAD).map(load).collect::<Vec<_>>() {
            let pairs = gates.numbers().into_iter().zip(factors.numbers());
            let products: Vec<_> = pairs.map(|(gate, factor)| activated(config, gate) * factor).collect();
            let products = Chunk::of(out_dtype, &products);
            k.when(in_bounds, || products.store(out.plus(i * THREADS * width)));
        }
    })
}

#[track_caller]
fn activated(config: ActivationConfig, x: Value<'_, f32>) -> Value<'_, f32> {
    let exact = config.dtypes.1 == Dtype::F32;
    match config.activation {
        Activation::Silu => x * logistic(x, LOG2_E, exact),
        Activation::Gelu => x * normal_distribution(x, exact),
        Activation::GeluTanh => {
            // (1 + tanh u) / 2 = 1 / (1 + e^-2u), without the cancellation for negative u
            const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
            let u = x * (x * x).mul_add(0.044_715, 1.0);
            x * logistic(u, 2.0 * SQRT_2_OVER_PI * LOG2_E, exact)
        }
    }
}

/// `1 / (1 + 2^(-factor · x))`
#[track_caller]
fn logistic(x: Value<'_, f32>, factor: f64, exact: bool) -> Value<'_, f32> {
    let power = if exact { power_of_two(x, -factor) } else { (x * -factor as f32).exp2() };
    (power + 1.0).recip()
}

/// `2^(x · factor)` with the relative accuracy of `exp2`, although the product is rounded: `2^(p + e) ≈ 2^p · (1 + e · ln 2)`. Out of range it saturates to 0 or infinity; for NaN the result is unspecified.
#[track_caller]
fn power_of_two(x: Value<'_, f32>, factor: f64) -> Value<'_, f32> {
    let (high, limit) = (factor as f32, (200.0 / factor.abs()) as f32);
    let low = (factor - f64::from(high)) as f32;
    let x = x.min(limit).max(-limit);
    let product = x * high;
    let rounding_error = x.mul_add(low, x.mul_add(high, -product));
    // multiply instead of add: infinity stays infinity
    product.exp2() * rounding_error.mul_add(std::f32::consts::LN_2, 1.0)
}

/// `Φ(x)`. With `t = 1 / (1 + |x| / 4)`, `Φ(-|x|) = e^(-x²/2) · t · P(t)`. P is fitted over all x, with a relative error of 1.5e-6, or 1e-7 for f32. There is no erf instruction, and `1 + erf` would cancel for negative x.
#[track_caller]
fn normal_distribution(x: Value<'_, f32>, exact: bool) -> Value<'_, f32> {
    const COEFFICIENTS: [f32; 8] = [
        -0.039_972_66, 0.088_425_79, 0.003_106_406, 0.076_451_58, 0.078_837_79, 0.093_685_77, 0.099_729_16,
        0.099_735_62,
    ];
    const EXACT_COEFFICIENTS: [f32; 10] = [
        0.020_814_888, -0.085_389_23, 0.103_798_86, -0.039_746_862, 0.068_274_0, 0.057_446_26, 0.081_889_63,
        0.093_439_51, 0.099_737_4, 0.099_735_56,
    ];
    let t = x.abs().mul_add(0.25, 1.0).recip();
    let evaluate = |coefficients: &[f32]| {
        let first = t.builder().constant(coefficients[0]);
        coefficients[1..].iter().fold(first, |p, &next| p.mul_add(t, next))
    };
    let (p, gauss) = match exact {
        true => {
            let square = x * x;
            // rounding error of the square
            let rounding_error = x.mul_add(x, -square).unless(square.gt(400.0), 0.0) * -0.5;
            let gauss = power_of_two(square, -0.5 * LOG2_E);
            (evaluate(&EXACT_COEFFICIENTS), gauss * (rounding_error + 1.0))
        }
        false => (evaluate(&COEFFICIENTS), (x * x * (-0.5 * LOG2_E) as f32).exp2()),
    };
    let tail = gauss * (t * p);
    x.lt(0.0).select(tail, -tail + 1.0)
}
