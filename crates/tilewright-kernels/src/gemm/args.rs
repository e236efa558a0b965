//! Prologue and epilogue that all GEMM kernels share: parameters, the row segment and weight of a CTA, and result
//! stores.

use super::params::{Epilogue, GemmRegs, GroupRegs, MatrixRegs};
use crate::tile::{Chunk, Elements};
use tilewright::Dtype;
use tilewright_ptx::{Access, Builder, Global, Value};

/// Bytes of a line of the L2 cache.
const LINE: u32 = 128;
/// CTAs that prefetch: about as many as are resident at once.
const PREFETCHING_CTAS: u32 = 2048;
/// Lines that a launch prefetches: 4 MB, which memory delivers during the end of one kernel and the start of the next. 16 MB were
/// up to 3 % slower on an H100.
const PREFETCHED_LINES: u32 = (4 << 20) / LINE;

/// Kernel parameters in the order of [`super::GemmParams::launch`], offset to the segment of this CTA.
#[derive(Debug, Clone, Copy)]
pub(super) struct GemmArgs<'k> {
    /// x from the first row of the segment on, and its row stride.
    pub(super) x: (Elements<'k>, Value<'k, u64>),
    /// Weight of the segment, and its row stride.
    pub(super) weight: (Elements<'k>, Value<'k, u64>),
    /// Rows of the segment.
    pub(super) rows: Value<'k, u32>,
    pub(super) features: Value<'k, u32>,
    pub(super) inputs: Value<'k, u32>,
    out: (Elements<'k>, Value<'k, u64>),
    bias: Option<Elements<'k>>,
    epilogue: Epilogue,
}

impl<'k> GemmArgs<'k> {
    #[track_caller]
    pub(super) fn new(k: &'k Builder, x: Dtype, weight: Dtype, epilogue: Epilogue) -> Self {
        let params = GemmRegs::declare(k, epilogue);
        let matrix = |of: MatrixRegs<'k>, dtype| (Elements::new(of.address, dtype), of.stride);
        let (mut x, mut weight, mut out) =
            (matrix(params.x, x), matrix(params.weight, weight), matrix(params.out, epilogue.out));
        let bias = params.bias.zip(epilogue.bias).map(|(bias, dtype)| Elements::new(bias, dtype));
        let [mut rows, features, inputs] = params.shape;
        if let Some(GroupRegs { indptr, ids, stride }) = params.groups {
            let segment = indptr.at(k.cta_z());
            let (begin, end) = (segment.load(), segment.plus(1).load());
            let id = k.var::<u32>("id", k.cta_z());
            k.when(ids.ne(0), || id.set(Global::<u32>::new(ids).at(k.cta_z()).load()));
            weight.0 = weight.0.at_wide(id.get().to_u64() * stride);
            x.0 = x.0.at_wide(begin.to_u64() * x.1);
            out.0 = out.0.at_wide(begin.to_u64() * out.1);
            rows = end - begin;
        }
        Self { x, weight, rows, features, inputs, out, bias, epilogue }
    }

    /// Begins a dependent kernel of `threads` threads: prefetches the first weights of `count` features from `first` on into L2 while the
    /// previous kernel runs, then waits for it. It may write the weights, because L2 is coherent.
    #[track_caller]
    pub(super) fn begin_dependent(&self, first: Value<'k, u32>, count: u32, threads: u32) {
        let (k, size) = (first.builder(), self.weight.0.dtype().size() as u32);
        k.launch_dependents();
        let lines = (self.inputs * size + (LINE - 1)) / LINE;
        let most = k.constant(PREFETCHED_LINES) / k.ctas().min(PREFETCHING_CTAS);
        let end = k.cta().lt(PREFETCHING_CTAS).select((lines * count).min(most), k.constant(0));
        k.repeat((k.thread(), end), threads, |at| {
            let (feature, line) = (first + at % count, at / count);
            let row = self.weight_row(feature.min(self.features - 1));
            Global::<u32>::new(row.at(line * (LINE / size)).address()).prefetch();
        });
        k.wait_for_prerequisites();
    }

    /// First element of a row of x.
    #[track_caller]
    pub(super) fn x_row(&self, row: Value<'k, u32>) -> Elements<'k> {
        self.x.0.at_wide(row.to_u64() * self.x.1)
    }

    #[track_caller]
    pub(super) fn weight_row(&self, feature: Value<'k, u32>) -> Elements<'k> {
        self.weight.0.at_wide(feature.to_u64() * self.weight.1)
    }

    /// Adds the bias and writes adjacent elements of a row, skipping those out of bounds. Paired stores require an
    /// even `feature`.
    #[track_caller]
    pub(super) fn store(&self, row: Value<'k, u32>, feature: Value<'k, u32>, sums: &[Value<'k, f32>]) {
        let k = row.builder();
        let out = self.out.0.at_wide(row.to_u64() * self.out.1).at(feature);
        let with_bias = |i: u32| match self.bias {
            None => sums[i as usize],
            Some(bias) => sums[i as usize] + bias.at(feature).plus(i).number(Access::ReadOnly),
        };
        let inside = row.lt(self.rows);
        let count = sums.len() as u32;
        if self.epilogue.paired && count.is_multiple_of(2) {
            for i in (0..count).step_by(2) {
                k.when(inside & (feature + i).lt(self.features), || {
                    let pair = [with_bias(i), with_bias(i + 1)];
                    Chunk::of(self.epilogue.out, &pair).store(out.plus(i));
                });
            }
            return;
        }
        for i in 0..count {
            k.when(inside & (feature + i).lt(self.features), || {
                Chunk::of(self.epilogue.out, &[with_bias(i)]).store(out.plus(i));
            });
        }
    }
}
