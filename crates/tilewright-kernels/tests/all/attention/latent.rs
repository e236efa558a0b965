//! Latent attention: keys in two parts, the first of which is the values, and features of the latent kernel only.

use super::{
    case::{CAUSAL, Case, FULL},
    judge::check,
    numbers::bytes,
    world::{Segment, World},
};
use std::ops::Range;
use tilewright::{Dtype, HeadDim};
use tilewright_kernels::attention::params::{KvLayout, UNLIMITED};

/// Heads of DeepSeek.
const WHOLE_HEADS: HeadDim = HeadDim { qk: 576, vo: 512 };

/// Small heads, to keep tests short.
fn latent(heads: usize, lengths: &[(usize, usize)]) -> Case {
    Case::new(128, (heads, 1), lengths)
        .with(|case| (case.latent, case.dim) = (true, HeadDim { qk: 192, vo: 128 }))
}

impl World {
    fn each_key(&self, mut body: impl FnMut(&Segment, usize)) {
        let keys = self.segments.iter().flat_map(|segment| (0..segment.len).map(move |key| (segment, key)));
        keys.for_each(|(segment, key)| body(segment, key));
    }

    /// Copies a part of all keys to its own tensor; memory outside of keys is NaN.
    pub(crate) fn part(&self, part: Range<usize>) -> Vec<u8> {
        let (case, size) = (&self.case, self.case.kv.size());
        let mut pool = bytes(case.kv, f64::NAN).repeat(self.pool(part.len()));
        self.each_key(|segment, key| {
            let from = (self.element(case.dim.qk, segment, (key, 0)) + part.start) * size;
            let to = self.element(part.len(), segment, (key, 0)) * size;
            pool[to..][..part.len() * size].copy_from_slice(&self.k[from..][..part.len() * size]);
        });
        pool
    }

    /// Writes non-finite elements to keys, then copies the first part of each key to the reference values.
    pub(crate) fn poison_latent(&mut self) {
        let (dim, size) = (self.case.dim, self.case.kv.size());
        for &(request, key, value) in &self.case.spoiled {
            let segment = &self.segments[request + usize::from(self.case.prefix > 0)];
            let at = self.element(dim.qk, segment, (key, 0)) + key % dim.vo;
            self.k[at * size..][..size].copy_from_slice(&bytes(self.case.kv, value));
        }
        let mut values = std::mem::take(&mut self.v);
        self.each_key(|segment, key| {
            let [from, to] = [dim.qk, dim.vo].map(|dim| self.element(dim, segment, (key, 0)) * size);
            values[to..][..dim.vo * size].copy_from_slice(&self.k[from..][..dim.vo * size]);
        });
        self.v = values;
    }
}

#[test]
fn decode_of_uneven_requests() {
    check(&latent(16, &[(1, 70), (1, 3), (1, 0), (1, 33)]).with(|case| case.seeds = 2));
    check(&latent(128, &[(1, 40), (1, 0), (1, 65)]).with(|case| case.workers = 3));
}

#[test]
fn logits_that_grow() {
    for growth in [4.0, 40.0] {
        check(&latent(20, &[(1, 300), (3, 150)]).with(|case| case.growth = growth));
    }
}

#[test]
fn whole_heads() {
    for heads in [16, 70] {
        let case = latent(heads, &[(1, 100)]).with(|case| case.dim = WHOLE_HEADS);
        check(&case.with(|case| (case.piece, case.workers) = (64, 2)));
    }
}

#[test]
fn groups() {
    for heads in [1, 15, 17, 33, 65] {
        check(&latent(heads, &[(1, 40), (2, 70)]).with(|case| case.piece = 64));
    }
}

#[test]
fn prefill_append_and_mixed_batches() {
    let lengths = [(5, 90), (1, 130), (40, 40), (3, 3), (0, 7), (12, 5)];
    check(&latent(4, &lengths).with(|case| (case.piece, case.workers, case.seeds) = (64, 5, 2)));
    check(&latent(16, &lengths).with(|case| case.mask = FULL));
}

#[test]
fn every_size_of_shared_memory() {
    for (arch, groups) in [(80, 4), (86, 2), (120, 2)] {
        let case = latent(40, &[(1, 90), (3, 150)]).with(|case| case.arch = arch);
        check(&case);
        let whole =
            case.with(|case| (case.dim, case.heads, case.lengths) = (WHOLE_HEADS, (33, 1), vec![(2, 100)]));
        assert_eq!(whole.q_rows(), 16 * groups);
        check(&whole);
    }
}

#[test]
fn pages_and_layouts() {
    for (page_size, hnd) in [(1, false), (5, true), (16, true), (64, false)] {
        let case = latent(4, &[(1, 100), (10, 30)]);
        check(&case.with(|case| (case.page_size, case.hnd) = (page_size, hnd)));
    }
    check(&latent(4, &[(1, 100), (10, 30)]).with(|case| case.layout = KvLayout::Ragged));
    for (mask, block) in [(FULL, 4), (CAUSAL, 4), ((30, 0), 16)] {
        let case = latent(2, &[(1, 80), (30, 70)]);
        check(&case.with(|case| (case.layout, case.page_size, case.mask) = (KvLayout::Blocks, block, mask)));
    }
}

#[test]
fn windows_and_mask_bits() {
    for mask in [(20, 0), (3, 5), (UNLIMITED, 9), (0, 0), (70, 0)] {
        let case = latent(2, &[(1, 150), (40, 90), (10, 4)]).with(|case| case.mask = mask);
        check(&case.with(|case| case.piece = 64));
    }
    for (columns, mask) in [(7, FULL), (40, CAUSAL), (1000, FULL)] {
        let case = latent(2, &[(1, 80), (21, 90), (5, 5)]);
        check(&case.with(|case| (case.bits, case.mask, case.piece) = (Some(columns), mask, 64)));
    }
}

#[test]
fn levels_of_a_cascade_and_long_splits() {
    let case = latent(4, &[(1, 100), (3, 90), (1, 128), (20, 100)]);
    check(&case.with(|case| (case.prefix, case.piece, case.workers, case.seeds) = (70, 64, 3, 2)));
    let long = latent(16, &[(1, 64 * 20 + 3)]);
    check(&long.with(|case| (case.piece, case.workers, case.seeds) = (64, 7, 3)));
}

#[test]
fn f16() {
    let f16 = |case: &mut Case| (case.qo, case.kv) = (Dtype::F16, Dtype::F16);
    check(&latent(8, &[(1, 90), (33, 70)]).with(f16));
}

#[test]
fn values_that_are_not_finite() {
    let spoiled = [
        (0, 3, f64::NAN),
        (0, 40, f64::INFINITY),
        (1, 25, f64::NAN),
        (1, 41, f64::NEG_INFINITY),
        (1, 60, f64::INFINITY),
        (1, 64, f64::NEG_INFINITY),
        (2, 10, f64::NAN),
    ];
    for (dtype, heads) in [(Dtype::Bf16, 2), (Dtype::F16, 16)] {
        let case = latent(heads, &[(1, 70), (40, 90), (5, 12)]);
        let case = case.with(|case| (case.qo, case.kv, case.spoiled) = (dtype, dtype, spoiled.to_vec()));
        check(&case.clone().with(|case| case.mask = (30, 0)));
        check(&case.with(|case| (case.bits, case.seeds) = (Some(40), 2)));
    }
}
