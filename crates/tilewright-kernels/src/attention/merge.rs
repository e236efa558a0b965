//! Merges attention states: what rows of attention over parts of the keys become over all of them.
//!
//! ```text
//! m = max lse_i     w_i = 2^(lse_i - m)     v = Σ w_i · v_i / Σ w_i     lse = m + log2 Σ w_i
//! ```
//!
//! LSE is base 2. A state of no keys is 0 and -inf, and so is what such states merge into; a NaN among the LSE makes NaN.
//! Shapes: of two states v_a, v_b, v `[rows, heads, head_dim]`, lse `[rows, heads]` f32; of many `[rows, states, heads, head_dim]` and
//! `[rows, states, heads]`; all dense, values of one dtype, aligned to 16 bytes.
//! Grid: `[Merge::ctas(rows · heads), 1, 1]`.

use crate::tile::{Packed, RowPlace, Rows, Vector};
use tilewright_ptx::{
    build::{Builder, Global, Value, Var},
    ir::Kernel,
    isa::memory::Access,
    verify::Invalid,
};

/// States whose values a thread asks for at once.
const BATCH: u32 = 4;

/// What a kernel is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Merge {
    /// Elements of a head.
    pub head_dim: u32,
}

impl Merge {
    fn rows<T: Packed>(self, name: &str) -> Result<Rows, Invalid> {
        let (dim, step) = (self.head_dim, T::PER_VECTOR);
        // a head is one warp's business, so that states can be merged in place
        let most = 128 * step;
        if dim == 0 || !dim.is_multiple_of(step) || dim > most {
            let why = format!("head_dim = {dim}, expected a multiple of {step} in {step}..={most}");
            return Err(Invalid::of(name, why));
        }
        Ok(Rows::new(dim / step))
    }

    /// CTAs for `heads` heads of all rows together, of elements `T`, for a kernel that exists.
    pub fn ctas<T: Packed>(self, heads: u32) -> u32 {
        Rows::new(self.head_dim / T::PER_VECTOR).ctas(heads)
    }
}

/// Two states. Parameters: v_a, lse_a, v_b, lse_b, v, lse; rows (u32), counting each head of a row. The result may replace the
/// first or the second.
///
/// # Errors
/// When a head is not a number of whole vectors that a warp has registers for.
pub fn merge_state<T: Packed>(name: &str, config: Merge) -> Result<Kernel, Invalid> {
    let rows = config.rows::<T>(name)?;
    Builder::kernel(name, rows.cta_threads(), |k| {
        let state = |of: &str| (k.global::<T>(&format!("v{of}")), k.global::<f32>(&format!("lse{of}")));
        let (states, to) = ([state("_a"), state("_b")], state(""));
        rows.place(k, k.param("rows"), |place| {
            let head = Head::<T>::new(k, config, place);
            let row = place.row.to_u64();
            let loaded = states.map(|(v, lse)| (head.load(v, row), head.lse(lse, row)));
            // the lanes of a head have read its LSE before one of them writes it
            k.sync_warp();
            head.begin(loaded[0].1.max(loaded[1].1));
            loaded.iter().for_each(|(vectors, lse)| head.add(vectors, *lse));
            head.store(to);
        });
    })
}

/// Any number of states, also none. Parameters: v, lse of the states; v_out, lse_out; rows, states, heads (u32), where `rows` counts
/// each head of a row. The result is elsewhere.
///
/// # Errors
/// As [`merge_state`].
pub fn merge_states<T: Packed>(name: &str, config: Merge) -> Result<Kernel, Invalid> {
    let rows = config.rows::<T>(name)?;
    Builder::kernel(name, rows.cta_threads(), |k| {
        let (v, lse) = (k.global::<T>("v"), k.global::<f32>("lse"));
        let to = (k.global::<T>("v_out"), k.global::<f32>("lse_out"));
        let (count, states, heads) = (k.param("rows"), k.param::<u32>("states"), k.param::<u32>("heads"));
        rows.place(k, count, |place| {
            let head = Head::<T>::new(k, config, place);
            let first = (place.row / heads).to_u64() * states.to_u64() * heads.to_u64();
            let first = first + (place.row % heads).to_u64();
            let state = |i: Value<'_, u32>| first + i.to_u64() * heads.to_u64();
            let max = k.var("max", f32::NEG_INFINITY);
            k.when(place.in_rows, || {
                k.repeat((0, states), 1, |i| max.set(max.get().max(lse.at_wide(state(i)).load())));
            });
            head.begin(max.get());
            k.repeat((0, states), BATCH, |i| {
                let batch = (0..BATCH).map(|ahead| {
                    let (head, state) = (head.only_when((i + ahead).lt(states)), state(i + ahead));
                    (head.load(v, state), head.lse(lse, state))
                });
                let batch: Vec<_> = batch.collect();
                batch.iter().for_each(|(vectors, lse)| head.add(vectors, *lse));
            });
            head.store(to);
        });
    })
}

/// A head of a row, and what its states have summed up to.
#[derive(Clone)]
struct Head<'k, T> {
    k: &'k Builder,
    place: RowPlace<'k>,
    config: Merge,
    condition: Value<'k, bool>,
    /// The greatest LSE, or 0 where all states are empty.
    reference: Var<'k, f32>,
    weights: Var<'k, f32>,
    sums: Vec<Vec<Var<'k, f32>>>,
    ty: std::marker::PhantomData<T>,
}

impl<'k, T: Packed> Head<'k, T> {
    #[track_caller]
    fn new(k: &'k Builder, config: Merge, place: RowPlace<'k>) -> Self {
        let vector = || (0..T::PER_VECTOR).map(|_| k.var("v", 0.0)).collect();
        Self {
            k,
            place,
            config,
            condition: place.in_rows,
            reference: k.unset_var("reference"),
            weights: k.var("weights", 0.0),
            sums: place.vectors().iter().map(|_| vector()).collect(),
            ty: std::marker::PhantomData,
        }
    }

    /// The same, whose loads give empty states where `condition` does not hold.
    #[must_use]
    #[track_caller]
    fn only_when(&self, condition: Value<'k, bool>) -> Self {
        Self { condition: self.condition & condition, ..self.clone() }
    }

    /// This thread's first vector of a state's head, which is the `state`th of all in memory.
    #[track_caller]
    fn first(&self, v: Global<'k, T>, state: Value<'k, u64>) -> Global<'k, T> {
        v.at_wide(state * u64::from(self.config.head_dim)).at(self.place.thread * T::PER_VECTOR)
    }

    #[track_caller]
    fn load(&self, v: Global<'k, T>, state: Value<'k, u64>) -> Vec<Vector<'k, T>> {
        let first = self.first(v, state);
        let load = |at: &crate::tile::VectorPlace<'k>| {
            let from = first.plus(at.after_first * T::PER_VECTOR as usize);
            Vector::load_when(self.k, at.is_there & self.condition, from, Access::Streaming)
        };
        self.place.vectors().iter().map(load).collect()
    }

    #[track_caller]
    fn lse(&self, lse: Global<'k, f32>, state: Value<'k, u64>) -> Value<'k, f32> {
        let value = self.k.var("lse", f32::NEG_INFINITY);
        self.k.when(self.condition, || value.set(lse.at_wide(state).load()));
        value.get()
    }

    /// Begins to sum states whose greatest LSE is `max`.
    #[track_caller]
    fn begin(&self, max: Value<'k, f32>) {
        // where nothing was seen: (-inf) - (-inf) would be NaN
        self.reference.set(max.unless(max.eq(f32::NEG_INFINITY), 0.0));
    }

    #[track_caller]
    fn add(&self, vectors: &[Vector<'k, T>], lse: Value<'k, f32>) {
        let weight = (lse - self.reference.get()).exp2();
        self.weights.set(self.weights.get() + weight);
        for (sums, vector) in self.sums.iter().zip(vectors) {
            for (sum, number) in sums.iter().zip(vector.numbers()) {
                sum.set(number.mul_add(weight, sum.get()));
            }
        }
    }

    #[track_caller]
    fn store(&self, (v, lse): (Global<'k, T>, Global<'k, f32>)) {
        let (k, place, weights) = (self.k, self.place, self.weights.get());
        let empty = weights.eq(0.0);
        let factor = weights.recip().unless(empty, 0.0);
        let first = self.first(v, place.row.to_u64());
        for (at, sums) in place.vectors().iter().zip(&self.sums) {
            let numbers: Vec<_> = sums.iter().map(|sum| sum.get() * factor).collect();
            let vector = Vector::<T>::of(k, &numbers);
            k.when(at.is_there & place.in_rows, || {
                vector.store(first.plus(at.after_first * T::PER_VECTOR as usize));
            });
        }
        k.when(place.in_rows & place.thread.eq(0), || {
            let merged = self.reference.get() + weights.log2();
            lse.at_wide(place.row.to_u64()).store(merged.unless(empty, f32::NEG_INFINITY));
        });
    }
}
