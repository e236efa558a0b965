//! RMSNorm, alone or with the residual addition before it: one read and one write of each row, which stays in registers.
//!
//! ```text
//! y = x / sqrt(mean(x²) + eps) · weight          summed in f32, rounded once
//! ```
//!
//! Shapes: x, out, residual `[rows, hidden]`, rows any stride apart; weight `[hidden]`; all of one dtype, aligned to 16 bytes, and
//! so are strides. Strides are in elements. Grid: `[Norm::ctas(rows), 1, 1]`.

use crate::tile::{Packed, RowPlace, Rows, Vector, VectorPlace};
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
        let (count, strides, eps) = (k.param("rows"), strides(k, ["x_stride", "out_stride"]), k.param("eps"));
        let memory = memory(k, rows);
        rows.place(k, count, |place| {
            let norm = RowNorm { k, config, place, weight, memory };
            let (x, out) = (norm.row_of(x, strides[0]), norm.row_of(out, strides[1]));
            let (x, factors) = (norm.load(x), norm.factors());
            let x = x.into_iter().map(Vector::numbers).collect();
            norm.store(out, norm.scaled(x, factors, eps));
        });
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
        let (count, strides, eps) =
            (k.param("rows"), strides(k, ["x_stride", "residual_stride"]), k.param("eps"));
        let memory = memory(k, rows);
        rows.place(k, count, |place| {
            let norm = RowNorm { k, config, place, weight, memory };
            let (x, residual) = (norm.row_of(x, strides[0]), norm.row_of(residual, strides[1]));
            let (added, to, factors) = (norm.load(x), norm.load(residual), norm.factors());
            let sums: Numbers<'_> = added.into_iter().zip(to).map(sum).collect();
            norm.store(residual, sums.clone());
            norm.store(x, norm.scaled(sums, factors, eps));
        });
    })
}

/// The sums of two vectors.
#[track_caller]
fn sum<'k, T: Packed>((a, b): (Vector<'k, T>, Vector<'k, T>)) -> Vec<Value<'k, f32>> {
    a.numbers().into_iter().zip(b.numbers()).map(|(a, b)| a + b).collect()
}

/// Parameters of these names.
#[track_caller]
fn strides<'k>(k: &'k Builder, names: [&str; 2]) -> [Value<'k, u64>; 2] {
    names.map(|name| k.param(name))
}

/// A number for each warp.
#[track_caller]
fn memory(k: &Builder, rows: Rows) -> Shared<'_, f32> {
    k.shared("sums", rows.cta_threads() as usize / 32, 4)
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
    /// This thread's first vector of its row.
    #[track_caller]
    fn row_of(&self, x: Global<'k, T>, stride: Value<'k, u64>) -> Global<'k, T> {
        x.at_wide(self.place.row.to_u64() * stride).at(self.place.thread * T::PER_VECTOR)
    }

    #[track_caller]
    fn load(&self, first: Global<'k, T>) -> Vec<Vector<'k, T>> {
        self.load_when(self.place.in_rows, first, Access::Streaming)
    }

    #[track_caller]
    fn load_when(
        &self,
        condition: Value<'k, bool>,
        first: Global<'k, T>,
        access: Access,
    ) -> Vec<Vector<'k, T>> {
        let load = |at: VectorPlace<'k>| {
            let from = first.plus(at.after_first * T::PER_VECTOR as usize);
            Vector::load_when(self.k, at.is_there & condition, from, access)
        };
        self.place.vectors().into_iter().map(load).collect()
    }

    /// The weight of this thread's elements: asked for with them, so that it is there when the sum is.
    #[track_caller]
    fn factors(&self) -> Vec<Vector<'k, T>> {
        let first = self.weight.at(self.place.thread * T::PER_VECTOR);
        self.load_when(self.k.constant(true), first, Access::ReadOnly)
    }

    #[track_caller]
    fn scaled(&self, x: Numbers<'k>, factors: Vec<Vector<'k, T>>, eps: Value<'k, f32>) -> Numbers<'k> {
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
            self.k.when(at.is_there & self.place.in_rows, || vector.store(to));
        }
    }
}
