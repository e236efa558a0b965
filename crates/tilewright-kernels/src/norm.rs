//! RMSNorm, alone or with the residual addition before it: one read and one write of each row, which stays in registers.
//!
//! ```text
//! y = x / sqrt(mean(x²) + eps) · weight          summed in f32, rounded once
//! ```
//!
//! Shapes: x, out, residual `[rows, hidden]`, rows any stride apart; weight `[hidden]`; all of one dtype, aligned to 16 bytes, and
//! so are strides. Strides are in elements. Grid: `[Norm::ctas(rows), 1, 1]`.

use crate::tile::{Packed, RowPlace, Rows, Vector};
use tilewright_ptx::{
    build::{Builder, Global, Shared, Value},
    ir::Kernel,
    isa::memory::Access,
    verify::Invalid,
};

/// What a kernel is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Norm {
    /// Elements of a row.
    pub hidden: u32,
    /// Whether the weight is stored less one (Gemma).
    pub weight_plus_one: bool,
}

impl Norm {
    fn rows<T: Packed>(self, name: &str) -> Result<Rows, Invalid> {
        let (hidden, step) = (self.hidden, T::PER_VECTOR);
        let most = Rows::MAX_VECTORS * step;
        if hidden == 0 || !hidden.is_multiple_of(step) || hidden > most {
            let why = format!("hidden = {hidden}, expected a multiple of {step} in {step}..={most}");
            return Err(Invalid::of(name, why));
        }
        Ok(Rows::new(hidden / step))
    }

    /// CTAs for `rows` rows of elements `T`, for a kernel that exists.
    pub fn ctas<T: Packed>(self, rows: u32) -> u32 {
        Rows::new(self.hidden / T::PER_VECTOR).ctas(rows)
    }
}

/// RMSNorm. Parameters: x, weight, out; rows (u32); x_stride, out_stride (u64); eps (f32). `out` may be `x`.
///
/// # Errors
/// When `hidden` is not a number of whole vectors that a CTA has registers for.
pub fn rmsnorm<T: Packed>(name: &str, config: Norm) -> Result<Kernel, Invalid> {
    let rows = config.rows::<T>(name)?;
    Builder::kernel(name, rows.cta_threads(), |k| {
        let (x, weight, out) = (k.global::<T>("x"), k.global::<T>("weight"), k.global::<T>("out"));
        let norm = RowNorm::new(k, config, rows, weight);
        let (x, out) = (norm.row_of(x, "x_stride"), norm.row_of(out, "out_stride"));
        let eps = k.param("eps");
        let (numbers, factors) = (norm.load(x), norm.factors());
        norm.store(out, norm.scaled(numbers, factors, eps));
    })
}

/// Adds x to the residual and makes x the RMSNorm of the sum. The sum is f32 for the norm, and rounded for the residual.
/// Parameters: x, residual, weight; rows (u32); x_stride, residual_stride (u64); eps (f32).
///
/// # Errors
/// As [`rmsnorm`].
pub fn fused_add_rmsnorm<T: Packed>(name: &str, config: Norm) -> Result<Kernel, Invalid> {
    let rows = config.rows::<T>(name)?;
    Builder::kernel(name, rows.cta_threads(), |k| {
        let (x, residual, weight) = (k.global::<T>("x"), k.global::<T>("residual"), k.global::<T>("weight"));
        let norm = RowNorm::new(k, config, rows, weight);
        let (x, residual) = (norm.row_of(x, "x_stride"), norm.row_of(residual, "residual_stride"));
        let eps = k.param("eps");
        let (added, to, factors) = (norm.load(x), norm.load(residual), norm.factors());
        let sums = added.iter().zip(to).map(|(x, residual)| {
            x.numbers().iter().zip(residual.numbers()).map(|(&x, residual)| x + residual).collect()
        });
        let sums: Vec<Vec<_>> = sums.collect();
        norm.store(residual, sums.clone());
        norm.store(x, norm.scaled_numbers(sums, factors, eps));
    })
}

/// The norm of one row, by the threads that have it.
struct RowNorm<'k, T> {
    k: &'k Builder,
    config: Norm,
    place: RowPlace<'k>,
    weight: Global<'k, T>,
    memory: Shared<'k, f32>,
}

/// Vectors of a thread, as numbers.
type Numbers<'k> = Vec<Vec<Value<'k, f32>>>;

impl<'k, T: Packed> RowNorm<'k, T> {
    #[track_caller]
    fn new(k: &'k Builder, config: Norm, rows: Rows, weight: Global<'k, T>) -> Self {
        let place = rows.place(k, k.param("rows"));
        let memory = k.shared("sums", rows.cta_threads() as usize / 32, 4);
        Self { k, config, place, weight, memory }
    }

    /// This thread's first vector of its row.
    #[track_caller]
    fn row_of(&self, x: Global<'k, T>, stride: &str) -> Global<'k, T> {
        let stride = self.k.param::<u64>(stride);
        x.at_wide(self.place.row.to_u64() * stride).at(self.place.thread * T::PER_VECTOR)
    }

    #[track_caller]
    fn load(&self, first: Global<'k, T>) -> Vec<Vector<'k, T>> {
        self.load_with(first, Access::Streaming)
    }

    #[track_caller]
    fn load_with(&self, first: Global<'k, T>, access: Access) -> Vec<Vector<'k, T>> {
        let load = |at: &crate::tile::VectorPlace<'k>| {
            let from = first.plus(at.after_first * T::PER_VECTOR as usize);
            Vector::load_when(self.k, at.is_there, from, access)
        };
        self.place.vectors().iter().map(load).collect()
    }

    /// The weight of this thread's elements: asked for with them, so that it is there when the sum is.
    #[track_caller]
    fn factors(&self) -> Vec<Vector<'k, T>> {
        self.load_with(self.weight.at(self.place.thread * T::PER_VECTOR), Access::ReadOnly)
    }

    #[track_caller]
    fn scaled(&self, x: Vec<Vector<'k, T>>, factors: Vec<Vector<'k, T>>, eps: Value<'k, f32>) -> Numbers<'k> {
        self.scaled_numbers(x.into_iter().map(Vector::numbers).collect(), factors, eps)
    }

    #[track_caller]
    fn scaled_numbers(
        &self,
        x: Numbers<'k>,
        factors: Vec<Vector<'k, T>>,
        eps: Value<'k, f32>,
    ) -> Numbers<'k> {
        let squares = x.iter().flatten().fold(self.k.constant(0.0), |sum, &x| x.mul_add(x, sum));
        let sum = self.place.sum(self.memory, squares);
        let scale = sum.mul_add(1.0 / self.config.hidden as f32, eps).rsqrt();
        let offset = if self.config.weight_plus_one { 1.0 } else { 0.0 };
        let scaled = |(x, factors): (Vec<Value<'k, f32>>, Vector<'k, T>)| {
            let factors = factors.numbers().into_iter();
            // a sum with 0 would be an instruction
            let factors = factors.map(|factor| if offset == 0.0 { factor } else { factor + offset });
            x.into_iter().zip(factors).map(|(x, factor)| x * scale * factor).collect()
        };
        x.into_iter().zip(factors).map(scaled).collect()
    }

    #[track_caller]
    fn store(&self, first: Global<'k, T>, numbers: Numbers<'k>) {
        for (at, numbers) in self.place.vectors().iter().zip(numbers) {
            let vector = Vector::<T>::of(self.k, &numbers);
            let to = first.plus(at.after_first * T::PER_VECTOR as usize);
            self.k.when(at.is_there, || vector.store(to));
        }
    }
}
