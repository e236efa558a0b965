//! Gated activations: `out = act(x[.., ..d]) · x[.., d..]`, computed in f32 and rounded once.
//!
//! Shapes: x `[tokens, 2 d]`, out `[tokens, d]`, tokens any stride apart; each f32, f16 or bf16. Sizes are known at launch.
//! Results in f32 are computed to some 2^-21, others faster, to a few times 2^-20.

use crate::tile::{Chunk, Strided, StridedRows, chunk};
use std::f64::consts::LOG2_E;
use tilewright::Dtype;
use tilewright_ptx::{
    build::{Builder, Value},
    ir::Kernel,
    isa::memory::Access,
    sim::Arg,
    verify::Invalid,
};

const THREADS: u32 = 128;
/// Chunks of gates, and as many of factors, for a thread.
const EACH: u32 = 2;

/// The widest result: a grid has 2^16 - 1 CTAs in its second dimension.
pub const MAX_D: u32 = 0xffff * EACH * THREADS;

pub use tilewright::activation::Activation;

/// What a kernel is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gated {
    /// What is applied to the gate.
    pub activation: Activation,
    /// Of x, and of the result.
    pub dtypes: (Dtype, Dtype),
    /// Elements that are loaded at once: 1, or [`chunk::most`] of both dtypes.
    pub width: u32,
}

/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// What is applied to the gate.
    pub activation: Activation,
    /// Of x, and of the result.
    pub dtypes: (Dtype, Dtype),
    /// Tokens, and elements of a token's result.
    pub shape: [u32; 2],
    /// Gates and factors.
    pub x: Strided,
    /// The result.
    pub out: Strided,
}

impl Call {
    /// The kernel for it.
    pub fn gated(&self) -> Gated {
        let ((of_x, of_out), d) = (self.dtypes, u64::from(self.shape[1]));
        let elements = [self.x.alignment(of_x), self.out.alignment(of_out)].concat();
        let width = chunk::width(&[of_x, of_out], elements.into_iter().chain([d]));
        Gated { activation: self.activation, dtypes: self.dtypes, width }
    }

    /// Grid and arguments for [`Call::gated`]; there is at least one element, and `d` is at most [`MAX_D`].
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        let [tokens, d] = self.shape;
        let chunks = d / self.gated().width;
        let args = [&self.x.args()[..], &self.out.args(), &[Arg::U32(d), Arg::U32(chunks)]].concat();
        ([tokens, chunks.div_ceil(EACH * THREADS), 1], args)
    }
}

impl Gated {
    /// A name that no other configuration has.
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

/// The kernel of a configuration; its parameters are those of [`Call::launch`].
///
/// # Errors
/// None that a caller of [`Call::gated`] can provoke.
pub fn act_and_mul(name: &str, config: Gated) -> Result<Kernel, Invalid> {
    let ((of_x, of_out), width) = (config.dtypes, config.width);
    Builder::kernel(name, THREADS, |k| {
        let (x, out) = (StridedRows::param(k, "x", of_x), StridedRows::param(k, "out", of_out));
        let [d, chunks] = ["d", "chunks"].map(|name| k.param::<u32>(name));
        let (x, out) = (x.row(k.cta(), k.constant(0)), out.row(k.cta(), k.constant(0)));
        let first = (k.cta_y() * (THREADS * EACH) + k.thread()).named("chunk");
        let (gates, out) = (x.at(first * width), out.at(first * width));
        let factors = gates.at(d);
        let load = |i| {
            let is_there = (first + i * THREADS).lt(chunks);
            let [gates, factors] = [gates, factors]
                .map(|from| from.plus(i * THREADS * width).load_when(is_there, width, Access::Streaming));
            (i, is_there, gates, factors)
        };
        for (i, is_there, gates, factors) in (0..EACH).map(load).collect::<Vec<_>>() {
            let both = gates.numbers().into_iter().zip(factors.numbers());
            let products: Vec<_> = both.map(|(gate, factor)| activated(config, gate) * factor).collect();
            let products = Chunk::of(of_out, &products);
            k.when(is_there, || products.store(out.plus(i * THREADS * width)));
        }
    })
}

#[track_caller]
fn activated(config: Gated, x: Value<'_, f32>) -> Value<'_, f32> {
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

/// `2^(x · factor)`, relative to it as exact as `exp2` although the product is rounded: `2^(p + e) ≈ 2^p · (1 + e · ln 2)`. Beyond
/// what f32 holds it is 0 or infinity, and for NaN anything.
#[track_caller]
fn power_of_two(x: Value<'_, f32>, factor: f64) -> Value<'_, f32> {
    let (high, most) = (factor as f32, (200.0 / factor.abs()) as f32);
    let low = (factor - f64::from(high)) as f32;
    let x = x.min(most).max(-most);
    let product = x * high;
    let lost = x.mul_add(low, x.mul_add(high, -product));
    // a factor, not a summand: infinity stays infinity
    product.exp2() * lost.mul_add(std::f32::consts::LN_2, 1.0)
}

/// `Φ(x)`. With `t = 1 / (1 + |x| / 4)`, `Φ(-|x|) = e^(-x²/2) · t · P(t)`, whose P is fitted to all x, to a relative error of 1.5e-6,
/// and for elements of f32 to one of 1e-7: there is no instruction for erf, and 1 + erf would cancel where x is negative.
#[track_caller]
fn normal_distribution(x: Value<'_, f32>, exact: bool) -> Value<'_, f32> {
    const SHORT: [f32; 8] = [
        -0.039_972_66,
        0.088_425_79,
        0.003_106_406,
        0.076_451_58,
        0.078_837_79,
        0.093_685_77,
        0.099_729_16,
        0.099_735_62,
    ];
    const LONG: [f32; 10] = [
        0.020_814_888,
        -0.085_389_23,
        0.103_798_86,
        -0.039_746_862,
        0.068_274_0,
        0.057_446_26,
        0.081_889_63,
        0.093_439_51,
        0.099_737_4,
        0.099_735_56,
    ];
    let t = x.abs().mul_add(0.25, 1.0).recip();
    let of = |coefficients: &[f32]| {
        let first = t.builder().constant(coefficients[0]);
        coefficients[1..].iter().fold(first, |p, &next| p.mul_add(t, next))
    };
    let (p, gauss) = match exact {
        true => {
            let square = x * x;
            // what rounding the square lost
            let lost = x.mul_add(x, -square).unless(square.gt(400.0), 0.0) * -0.5;
            let gauss = power_of_two(square, -0.5 * LOG2_E);
            (of(&LONG), gauss * (lost + 1.0))
        }
        false => (of(&SHORT), (x * x * (-0.5 * LOG2_E) as f32).exp2()),
    };
    let tail = gauss * (t * p);
    x.lt(0.0).select(tail, -tail + 1.0)
}
