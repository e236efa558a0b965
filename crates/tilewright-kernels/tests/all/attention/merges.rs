//! The kernel of large merges, of states with chosen statistics and values.

use super::{
    case::{noise, number},
    world::run_merges,
};
use crate::units::body_configs::aligned_params;
use tilewright::{
    Dtype, HeadDim,
    attention::variant::{ExpressionVariant, Plain},
};
use tilewright_kernels::attention::{
    AttentionParams, CacheTensor, MergeItem, MergeSource, PeTensors, PlanArrays, RowTensor, ScaleTensor,
    body::{mla_wgmma::MlaWgmmaConfig, wgmma::kv_map},
    operator::AttentionKernel,
    params::{KernelKind, MlaWgmmaParams, OwnParams},
};
use tilewright_ptx::Memory;

/// Sources of other merges, which come first.
const OTHERS: usize = 5;
/// Unused elements after the heads of a token.
const PADDING: usize = 24;

/// A merge of all rows from `sources` states each.
struct Merge {
    dim: usize,
    /// Heads of a token. A row is a head of a token.
    heads: usize,
    sources: usize,
    /// The states with the largest maximum in rows 1, 2, ..: all other weights are 0. Other rows have none.
    largest: Vec<usize>,
}

impl Merge {
    fn rows(&self) -> usize {
        (1 + self.largest.len()).next_multiple_of(self.heads)
    }

    /// Maximum and sum of a state of a row.
    fn stats(&self, source: usize, row: usize) -> [f32; 2] {
        let is_largest = row > 0 && self.largest.get(row - 1) == Some(&source);
        let max = noise(1, row * 1000 + source) + if is_largest { 300.0 } else { 0.0 };
        [max as f32, 1.5 + noise(2, row * 1000 + source) as f32]
    }

    /// An element of a state. States have different elements, so that each weighs much in an output.
    fn value(&self, source: usize, dim: usize) -> f32 {
        if source % self.dim == dim { 1.0 + (source / self.dim) as f32 } else { 0.0 }
    }

    /// LSE and outputs of a row.
    fn expected(&self, row: usize) -> (f64, Vec<f64>) {
        let states = || (0..self.sources).map(|source| (source, self.stats(source, row).map(f64::from)));
        let max = states().map(|(_, [max, _])| max).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = states().map(|(_, [of, sum])| (of - max).exp2() * sum).sum();
        let output = |dim| {
            let values = states().map(|(at, [of, _])| (of - max).exp2() * f64::from(self.value(at, dim)));
            values.sum::<f64>() / sum
        };
        (max + sum.log2(), (0..self.dim).map(output).collect())
    }

    /// A plan of this merge alone.
    fn plan(&self, memory: &mut Memory) -> PlanArrays {
        let (rows, end) = (self.rows(), OTHERS + self.sources);
        let source =
            |at: usize| MergeSource { partial: (at.saturating_sub(OTHERS) * rows) as u32, qo_begin: 0 };
        let sources: Vec<u32> = (0..end).flat_map(|at| source(at).to_words()).collect();
        let merge = MergeItem {
            kv_head: 0,
            qo_begin: 0,
            qo_len: (rows / self.heads) as u32,
            source_begin: OTHERS as u32,
            source_end: end as u32,
            arrivals: self.sources as u32,
            is_pair: 0,
        };
        PlanArrays {
            merges: memory.alloc_from(&merge.to_words()),
            sources: memory.alloc_from(&sources),
            ..PlanArrays::default()
        }
    }

    fn check(&self, ctas: u32) {
        let (rows, &Self { dim, heads, .. }, mut memory) = (self.rows(), self, Memory::new());
        let states = || (0..self.sources).flat_map(|source| (0..rows).map(move |row| (source, row)));
        let stats: Vec<f32> = states().flat_map(|(source, row)| self.stats(source, row)).collect();
        let values = states().flat_map(|(source, _)| (0..dim).map(move |dim| self.value(source, dim)));
        let stride = heads * dim + PADDING;
        let (o, lse) = (memory.alloc(rows / heads * stride * 2), memory.alloc(rows * 4));
        let one = ScaleTensor { address: 0, page: 0, head: 0, value: 1.0 };
        let call = AttentionParams {
            pe: Some(PeTensors::default()),
            o: RowTensor { address: o, row: stride as u64, head: dim as u64 },
            lse,
            partial_o: memory.alloc_from(&values.collect::<Vec<f32>>()),
            partial_stats: memory.alloc_from(&stats),
            plan: self.plan(&mut memory),
            qo_heads: heads as u32,
            group: heads as u32,
            page_size: 64,
            k_scale: one,
            v_scale: one,
            ..aligned_params(Dtype::Bf16)
        };
        // the number of merges, a counter and the merge
        let large_merges = memory.alloc_from(&[1_u32, 0, 0]);
        let maps = [dim as u64, 64].map(|dim| kv_map(CacheTensor::default(), 2, [1, 64, 1, dim], 64));
        let latent = Some(MlaWgmmaParams { box_rows: 64, maps, large_merges });
        let own = OwnParams { latent, ..OwnParams::default() };
        let args = &AttentionParams { own, ..call }.args(KernelKind::MlaWgmma);
        let (dtype, head_dim) = (Dtype::Bf16, HeadDim { qk: dim + 64, vo: dim });
        let config = MlaWgmmaConfig { dtype, kv: dtype, out: dtype, head_dim, heads };
        let plain = ExpressionVariant::of(&Plain).expect("it does nothing");
        let kernel = AttentionKernel::LargeMerges(config);
        run_merges(&kernel, &plain, (ctas, args, 0), &mut memory).expect("no fault");
        let lse = memory.read::<f32>(lse, rows).expect("all rows are written");
        for (row, lse) in lse.into_iter().enumerate() {
            let at = o + 2 * (row / heads * stride + row % heads * dim) as u64;
            let o = memory.read::<u16>(at, dim).expect("all elements are written");
            let (of_row, expected) = self.expected(row);
            assert!((f64::from(lse) - of_row).abs() < 1e-4, "row {row}: lse {lse}, not {of_row}");
            for (dim, expected) in expected.into_iter().enumerate() {
                let found = number(Dtype::Bf16, &o[dim].to_le_bytes());
                let close = (found - expected).abs() <= expected / 128.0 + 1e-9;
                assert!(close, "row {row} dim {dim}: {found}, not {expected}");
            }
        }
    }
}

/// One warp merges up to 32 states, more are divided among four warps; each adds them in batches of 32.
#[test]
fn states_of_each_batch_and_warp() {
    for (dim, heads, sources, largest) in [
        (128, 1, 1, vec![0]),
        (384, 3, 32, vec![0, 3, 4, 17, 18, 31]),
        (512, 4, 33, vec![0, 8, 9, 32]),
        (128, 3, 4 * 65 - 3, vec![0, 31, 32, 63, 64, 65, 96, 129, 130, 194, 195, 256]),
    ] {
        for ctas in [1, 3] {
            Merge { dim, heads, sources, largest: largest.clone() }.check(ctas);
        }
    }
}
