//! Merge of attention states: combines partial attention over disjoint key ranges.
//!
//! ```text
//! m = max lse_i     w_i = 2^(lse_i - m)     v = Σ w_i · v_i / Σ w_i     lse = m + log2 Σ w_i
//! ```
//!
//! LSE is base 2. A state of no keys is 0 and -inf, as is the merge of such states; a NaN in an LSE gives NaN. Shapes: values of
//! many states `[rows, states, heads, head_dim]`, of two `[rows, heads, head_dim]` each, of one dtype, f32, f16 or bf16; LSE the
//! same without the last axis, f32; any strides. A merge of two can be limited to the rows whose flag is not 0. Sizes are launch
//! parameters; only a class of head lengths is compiled in.

use crate::{
    attention::kernel::{
        epilogue::{lse, normalizer},
        softmax::finite_max,
    },
    tile::{Chunk, ChunkPlace, Elements, RowPartition, RowPlace, Strided, chunk},
};
use tilewright::Dtype;
use tilewright_ptx::{
    build::{Builder, Value, Var},
    ir::Kernel,
    isa::memory::Access,
    sim::Arg,
    verify::Invalid,
};

/// States whose values a thread prefetches together.
const BATCH: u32 = 4;

/// Compile-time configuration of a merge kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MergeConfig {
    /// Dtype of the values.
    pub dtype: Dtype,
    /// Elements per load: 1, or [`chunk::max_width`].
    pub width: u32,
    /// The class of head lengths.
    pub rows: RowPartition,
    /// The form of the inputs.
    pub kind: MergeKind,
}

/// The form of [`MergeInputs`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MergeKind {
    /// [`MergeInputs::Pair`]
    Pair,
    /// [`MergeInputs::MaskedPair`]
    MaskedPair,
    /// [`MergeInputs::Strided`]
    Strided,
}

/// Values and LSE of states in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateTensor {
    /// Address of the first value, in bytes.
    pub v: u64,
    /// Strides of rows, heads and elements, in elements.
    pub v_strides: [u64; 3],
    /// Address of the first LSE, in bytes.
    pub lse: u64,
    /// Strides of rows and heads of the LSE, in elements.
    pub lse_strides: [u64; 2],
}

/// The states to merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergeInputs {
    /// Two states; the result may overwrite either.
    Pair([StateTensor; 2]),
    /// Two states; the rows of the result whose flag is 0 are not written.
    MaskedPair {
        /// The states.
        states: [StateTensor; 2],
        /// Address of the first flag, an int8 per row.
        mask: u64,
        /// Stride of the flags, in elements.
        mask_stride: u64,
    },
    /// `count` states at a fixed stride; `count` may be 0.
    Strided {
        /// The first state of each row.
        first: StateTensor,
        /// Number of states.
        count: u32,
        /// Strides between states of values and LSE, in elements.
        strides: [u64; 2],
    },
}

/// Arguments of one launch.
#[derive(Debug, Clone, Copy)]
pub struct MergeParams {
    /// Dtype of the values.
    pub dtype: Dtype,
    /// Rows, heads, elements per head.
    pub shape: [u32; 3],
    /// The states to merge.
    pub states: MergeInputs,
    /// The result.
    pub out: StateTensor,
}

impl StateTensor {
    fn alignment(self, dtype: Dtype) -> Vec<u64> {
        let rows = Strided { address: self.v, strides: [self.v_strides[0], self.v_strides[1]] };
        rows.alignment(dtype).to_vec()
    }

    fn args(self) -> Vec<Arg> {
        let words = [&[self.v][..], &self.v_strides, &[self.lse], &self.lse_strides].concat();
        words.into_iter().map(Arg::U64).collect()
    }
}

impl MergeParams {
    /// The kernel for these parameters; `None` if a head does not fit into registers.
    pub fn config(&self) -> Option<MergeConfig> {
        let (dtype, dim) = (self.dtype, self.shape[2]);
        let (states, stride) = match self.states {
            MergeInputs::Pair(states) | MergeInputs::MaskedPair { states, .. } => (states.to_vec(), 0),
            MergeInputs::Strided { first, strides, .. } => (vec![first], strides[0]),
        };
        let all = || states.iter().copied().chain([self.out]);
        let dense = dim == 1 || all().all(|state| state.v_strides[2] == 1);
        let elements = all().flat_map(|state| state.alignment(dtype)).chain([stride, u64::from(dim)]);
        let width = if dense { chunk::width(&[dtype], elements) } else { 1 };
        let rows = RowPartition::for_chunks(dim / width)?;
        let kind = match self.states {
            MergeInputs::Pair(_) => MergeKind::Pair,
            MergeInputs::MaskedPair { .. } => MergeKind::MaskedPair,
            MergeInputs::Strided { .. } => MergeKind::Strided,
        };
        Some(MergeConfig { dtype, width, rows, kind })
    }

    /// Grid and arguments for `config`, which is [`MergeParams::config`]; rows, heads and elements must not be 0.
    pub fn launch(&self, config: MergeConfig) -> ([u32; 3], Vec<Arg>) {
        let [rows, heads, dim] = self.shape;
        let mut args = match self.states {
            MergeInputs::Pair(pair) => pair.into_iter().flat_map(StateTensor::args).collect(),
            MergeInputs::MaskedPair { states: [a, b], mask, mask_stride } => {
                [a.args(), b.args(), vec![Arg::U64(mask), Arg::U64(mask_stride)]].concat()
            }
            MergeInputs::Strided { first, count, strides } => {
                [&first.args()[..], &strides.map(Arg::U64), &[Arg::U32(count)]].concat()
            }
        };
        args.extend(self.out.args());
        args.extend([rows * heads, heads, dim / config.width].map(Arg::U32));
        ([config.rows.ctas(rows * heads), 1, 1], args)
    }
}

impl MergeConfig {
    /// A unique name of the configuration.
    pub fn name(self) -> String {
        let prefix = match self.kind {
            MergeKind::Pair => "merge_state",
            MergeKind::MaskedPair => "merge_state_masked",
            MergeKind::Strided => "merge_states",
        };
        format!("{prefix}_{}_{}_{}", self.dtype, self.width, self.rows.name())
    }
}

/// Builds the kernel of a configuration; its parameters are those of [`MergeParams::launch`].
///
/// # Errors
/// None.
pub fn merge(name: &str, config: MergeConfig) -> Result<Kernel, Invalid> {
    match config.kind {
        MergeKind::Pair | MergeKind::MaskedPair => merge_state(name, config),
        MergeKind::Strided => merge_states(name, config),
    }
}

fn merge_state(name: &str, config: MergeConfig) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, config.rows.cta_threads(), |k| {
        let states = ["_a", "_b"].map(|of| StateTensorRegs::param(k, of, config.dtype));
        let mask = (config.kind == MergeKind::MaskedPair)
            .then(|| (Elements::param(k, "mask", Dtype::I8), k.param::<u64>("mask_stride")));
        let (to, sizes) = (StateTensorRegs::param(k, "", config.dtype), Sizes::param(k));
        config.rows.place(k, sizes.rows, sizes.chunks, |place| {
            let mut head = HeadMerge::new(k, config, place, sizes);
            if let Some((mask, stride)) = mask {
                let selected = k.var("selected", false);
                k.when(place.in_rows, || {
                    selected.set(mask.at_wide(head.row[0] * stride).number(Access::Weak).ne(0.0));
                });
                head = head.only_when(selected.get());
            }
            let loaded = states.each_ref().map(|state| (head.load(state, None), head.lse(state, None)));
            // all threads of a head must read its LSE before one of them overwrites it
            match config.rows.rows_per_cta() {
                1 => k.sync_threads(),
                _ => k.sync_warp(),
            }
            head.set_max(loaded[0].1.max(loaded[1].1));
            loaded.iter().for_each(|(chunks, lse)| head.accumulate(chunks, *lse));
            match mask {
                Some(_) => k.when(head.condition, || head.store(&to)),
                None => head.store(&to),
            }
        });
    })
}

fn merge_states(name: &str, config: MergeConfig) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, config.rows.cta_threads(), |k| {
        let from = StateTensorRegs::param(k, "_first", config.dtype);
        let state_strides = ["v_state_stride", "lse_state_stride"].map(|name| k.param::<u64>(name));
        let states = k.param::<u32>("states");
        let (to, sizes) = (StateTensorRegs::param(k, "", config.dtype), Sizes::param(k));
        config.rows.place(k, sizes.rows, sizes.chunks, |place| {
            let head = HeadMerge::new(k, config, place, sizes);
            let max = k.var("max", f32::NEG_INFINITY);
            k.repeat((0, states), 1, |i| {
                max.set(max.get().max(head.lse(&from, state_offset(state_strides, i))));
            });
            head.set_max(max.get());
            k.repeat((0, states), BATCH, |i| {
                let batch = (0..BATCH).map(|ahead| {
                    let (head, state) =
                        (head.only_when((i + ahead).lt(states)), state_offset(state_strides, i + ahead));
                    (head.load(&from, state), head.lse(&from, state))
                });
                let batch: Vec<_> = batch.collect();
                batch.iter().for_each(|(chunks, lse)| head.accumulate(chunks, *lse));
            });
            head.store(&to);
        });
    })
}

/// Offset of state `i` from the first, of values and LSE.
#[track_caller]
fn state_offset<'k>(state_strides: [Value<'k, u64>; 2], i: Value<'k, u32>) -> Option<[Value<'k, u64>; 2]> {
    Some(state_strides.map(|stride| i.to_u64() * stride))
}

/// A [`StateTensor`] in a kernel.
struct StateTensorRegs<'k> {
    v: Elements<'k>,
    v_strides: [Value<'k, u64>; 3],
    lse: Elements<'k>,
    lse_strides: [Value<'k, u64>; 2],
}

impl<'k> StateTensorRegs<'k> {
    #[track_caller]
    fn param(k: &'k Builder, of: &str, dtype: Dtype) -> Self {
        let stride = |tensor: &str, axis: &str| k.param(&format!("{tensor}{of}_{axis}_stride"));
        Self {
            v: Elements::param(k, &format!("v{of}"), dtype),
            v_strides: ["row", "head", "element"].map(|axis| stride("v", axis)),
            lse: Elements::param(k, &format!("lse{of}"), Dtype::F32),
            lse_strides: ["row", "head"].map(|axis| stride("lse", axis)),
        }
    }
}

/// Rows times heads, heads, chunks per head.
#[derive(Clone, Copy)]
struct Sizes<'k> {
    rows: Value<'k, u32>,
    heads: Value<'k, u32>,
    chunks: Value<'k, u32>,
}

impl<'k> Sizes<'k> {
    #[track_caller]
    fn param(k: &'k Builder) -> Self {
        Self { rows: k.param("rows"), heads: k.param("heads"), chunks: k.param("chunks") }
    }
}

/// One head of a row, with its merge accumulators.
#[derive(Clone)]
struct HeadMerge<'k> {
    k: &'k Builder,
    place: RowPlace<'k>,
    row: [Value<'k, u64>; 2],
    config: MergeConfig,
    condition: Value<'k, bool>,
    /// The maximum LSE, or 0 if all states are empty.
    max: Var<'k, f32>,
    weight_sum: Var<'k, f32>,
    sums: Vec<Vec<Var<'k, f32>>>,
}

impl<'k> HeadMerge<'k> {
    #[track_caller]
    fn new(k: &'k Builder, config: MergeConfig, place: RowPlace<'k>, sizes: Sizes<'k>) -> Self {
        let chunk = || (0..config.width).map(|_| k.var("v", 0.0)).collect();
        Self {
            k,
            place,
            row: [place.row / sizes.heads, place.row % sizes.heads].map(|at| at.to_u64()),
            config,
            condition: place.in_rows,
            max: k.unset_var("reference"),
            weight_sum: k.var("weights", 0.0),
            sums: place.chunks().iter().map(|_| chunk()).collect(),
        }
    }

    /// The same, with loads that return empty states if `condition` is false.
    #[must_use]
    #[track_caller]
    fn only_when(&self, condition: Value<'k, bool>) -> Self {
        Self { condition: self.condition & condition, ..self.clone() }
    }

    /// Locations of this thread's chunks in a state at an element offset.
    #[track_caller]
    fn chunks(
        &self,
        of: &StateTensorRegs<'k>,
        state_offset: Option<Value<'k, u64>>,
    ) -> Vec<(Elements<'k>, ChunkPlace<'k>)> {
        let [row, head] = self.row;
        let (width, thread) = (self.config.width, self.place.thread);
        let index = row * of.v_strides[0] + head * of.v_strides[1];
        let first = of.v.at_wide(state_offset.map_or(index, |state_offset| index + state_offset));
        let place = |at: ChunkPlace<'k>| match width {
            1 => (first.at_wide((thread + at.after_first).to_u64() * of.v_strides[2]), at),
            _ => (first.at(thread * width).plus(at.after_first * width), at),
        };
        self.place.chunks().into_iter().map(place).collect()
    }

    #[track_caller]
    fn load(&self, of: &StateTensorRegs<'k>, state_offset: Option<[Value<'k, u64>; 2]>) -> Vec<Chunk<'k>> {
        let load = |(from, at): (Elements<'k>, ChunkPlace<'k>)| {
            from.load_when(at.in_bounds & self.condition, self.config.width, Access::Streaming)
        };
        self.chunks(of, state_offset.map(|state_offset| state_offset[0])).into_iter().map(load).collect()
    }

    #[track_caller]
    fn lse_at(&self, of: &StateTensorRegs<'k>, state_offset: Option<[Value<'k, u64>; 2]>) -> Elements<'k> {
        let index = self.row[0] * of.lse_strides[0] + self.row[1] * of.lse_strides[1];
        of.lse.at_wide(state_offset.map_or(index, |state_offset| index + state_offset[1]))
    }

    #[track_caller]
    fn lse(&self, of: &StateTensorRegs<'k>, state_offset: Option<[Value<'k, u64>; 2]>) -> Value<'k, f32> {
        let (value, at) = (self.k.var("lse", f32::NEG_INFINITY), self.lse_at(of, state_offset));
        self.k.when(self.condition, || value.set(at.number(Access::Weak)));
        value.get()
    }

    /// Sets the maximum LSE before accumulation.
    #[track_caller]
    fn set_max(&self, max: Value<'k, f32>) {
        self.max.set(finite_max(max));
    }

    #[track_caller]
    fn accumulate(&self, chunks: &[Chunk<'k>], lse: Value<'k, f32>) {
        let weight = (lse - self.max.get()).exp2();
        self.weight_sum.set(self.weight_sum.get() + weight);
        for (sums, chunk) in self.sums.iter().zip(chunks) {
            for (sum, number) in sums.iter().zip(chunk.numbers()) {
                sum.set(number.mul_add(weight, sum.get()));
            }
        }
    }

    #[track_caller]
    fn store(&self, to: &StateTensorRegs<'k>) {
        let (k, place, weight_sum) = (self.k, self.place, self.weight_sum.get());
        let factor = normalizer(weight_sum);
        for ((to, at), sums) in self.chunks(to, None).into_iter().zip(&self.sums) {
            let numbers: Vec<_> = sums.iter().map(|sum| sum.get() * factor).collect();
            let chunk = Chunk::of(self.config.dtype, &numbers);
            k.when(at.in_bounds, || chunk.store(to));
        }
        k.when(place.in_rows & place.thread.eq(0), || {
            let lse = lse(self.max.get(), weight_sum);
            Chunk::of(Dtype::F32, &[lse]).store(self.lse_at(to, None));
        });
    }
}
