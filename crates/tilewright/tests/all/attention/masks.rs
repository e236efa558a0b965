//! Masks: windows, packed bits and draft trees against the oracle; masked keys cost no work and do not leak.

use crate::{Expected, Generator, Lens, Outcome, Sample, Storage, Stored, run_batch};
use tilewright::{
    Attention, Backend, Batch, Dtype, HeadDim, Heads, Mask, Problem, Workspace,
    attention::{
        BitOrder, PackedMask, Split, TreeMask, packbits,
        variant::{Plain, PrefixLm},
    },
    reference::attention::{Definition, LogitIndex},
};

const LENS: [Lens; 8] = [(1, 65), (70, 200), (3, 0), (5, 2), (1, 1), (17, 130), (0, 9), (64, 64)];
const SPLITS: [Split; 3] = [Split::Balanced, Split::Fixed { tokens: 64 }, Split::Never];
const STORAGES: [Storage; 3] = [Storage::Paged(1), Storage::Paged(16), Storage::Ragged];

fn problem(number: usize, mask: Mask) -> Problem {
    let group = [1, 3, 4, 8][number % 4];
    let dtype = [Dtype::F32, Dtype::Bf16][number % 2];
    let dim = [HeadDim::same(64), HeadDim { qk: 48, vo: 40 }, HeadDim::same(128)][number % 3];
    let heads = Heads { qo: 2 * group, kv: 2 };
    Problem::builder(heads, dim).dtypes(dtype, dtype).mask(mask).build().expect("it is sound")
}

fn run<B: Backend + Clone>(
    backend: &B,
    sample: &Sample,
    stored: &Stored,
    batch: &Batch<'_>,
    split: Split,
) -> Outcome {
    run_batch((backend, Plain), (sample, batch, stored.cache()), split, &mut Workspace::default())
}

fn windows_agree_with_the_oracle<B: Backend + Clone>(backends: &[B]) {
    let rights = [Some(0), Some(3), Some(64), None];
    let windows =
        [0, 1, 5, 63, 64, 200, u32::MAX].into_iter().flat_map(|left| rights.map(|right| (left, right)));
    for (number, (left, right)) in crate::judge::subset(windows.enumerate()) {
        let sample = Sample::random(problem(number, Mask::Window { left, right }), &LENS, number as u64);
        let stored = Stored::new(&sample, STORAGES[number % 3], number as u64);
        let expected = Expected::of(&sample);
        for (backend, split) in
            crate::judge::subset(backends.iter().flat_map(|b| SPLITS.map(|split| (b, split))))
        {
            let outcome = run(backend, &sample, &stored, &stored.batch(), split);
            expected.assert(backend, &outcome, format_args!("{}, {split:?}", sample.problem));
        }
    }
}

/// Packs the rows of `flags`, `[qo_len, kv_len]` per request, into bits.
fn packed(flags: &[Vec<bool>]) -> Vec<u8> {
    flags.iter().flat_map(|request| packbits(request, BitOrder::Little)).collect()
}

fn packed_masks_agree_with_the_oracle<B: Backend + Clone>(backends: &[B]) {
    let masks = [Mask::Full, Mask::Causal, Mask::Window { left: 20, right: Some(7) }];
    for (number, density) in crate::judge::subset([0.02, 0.5, 0.9, 1.0, 0.0, 0.3].into_iter().enumerate()) {
        let sample = Sample::random(problem(number, masks[number % 3]), &LENS, 100 + number as u64);
        let mut generator = Generator::new(number as u64);
        let mut bits = |lens: &Lens| {
            (0..lens.0 * lens.1).map(|_| (generator.below(1000) as f32) < 1000.0 * density).collect()
        };
        let flags: Vec<Vec<bool>> = LENS.iter().map(&mut bits).collect();
        let bytes = packed(&flags);
        let stored = Stored::new(&sample, STORAGES[number % 3], number as u64);
        let expected = Expected::by(&sample, &|r| {
            let (flags, kv_len) = (&flags[r], LENS[r].1);
            Definition { visible: Box::new(move |at| flags[at.i * kv_len + at.j]), ..Definition::default() }
        });
        for (backend, split) in
            crate::judge::subset(backends.iter().flat_map(|b| SPLITS.map(|split| (b, split))))
        {
            let batch = stored.batch().with_mask(PackedMask::new(&bytes));
            let outcome = run(backend, &sample, &stored, &batch, split);
            expected.assert(backend, &outcome, format_args!("density {density}, {split:?}"));
        }
    }
}

fn packed_masks_equal_built_in_masks<B: Backend + Clone>(backends: &[B]) {
    for mask in [Mask::Causal, Mask::Window { left: 9, right: Some(4) }] {
        let causal = Sample::random(problem(1, mask), &LENS, 7);
        let mut full = causal.clone();
        full.problem = problem(1, Mask::Full);
        let flags = LENS.map(|(qo_len, kv_len)| {
            let p = |i: usize| kv_len as i64 - qo_len as i64 + i as i64;
            let pairs = (0..qo_len).flat_map(|i| (0..kv_len).map(move |j| (i, j)));
            pairs
                .map(|(i, j)| tilewright::reference::attention::is_visible(mask, p(i), j))
                .collect::<Vec<bool>>()
        });
        let bytes = packed(&flags);
        let stored = Stored::new(&causal, Storage::Paged(16), 3);
        for backend in backends {
            let by_mask = run(backend, &causal, &stored, &stored.batch(), Split::Never);
            let batch = stored.batch().with_mask(PackedMask::new(&bytes));
            let by_bits = run(backend, &full, &stored, &batch, Split::Never);
            assert_eq!(by_mask.bits(), by_bits.bits(), "{}", backend.describe());
        }
    }
}

fn tree_drafts_attend_to_their_ancestors<B: Backend + Clone>(backends: &[B]) {
    let trees: [&[i32]; 4] = [&[-1, 0, 0, 1, 1, 2, -1, 6], &[], &[-1], &[-1, -1, 1, 2, 0, 4, 5, 5, 3, 8]];
    let lens = [(8, 300), (0, 5), (1, 64), (10, 10)];
    let tree = TreeMask::new(&trees).expect("parents come first");
    for mask in [Mask::Full, Mask::Causal] {
        let sample = Sample::random(problem(2, mask), &lens, 11);
        let stored = Stored::new(&sample, Storage::Paged(16), 5);
        let expected = Expected::by(&sample, &|r| {
            let (parents, context) = (trees[r], lens[r].1 - lens[r].0);
            let visible = move |at: LogitIndex| {
                let Some(key) = at.j.checked_sub(context) else { return true };
                let mut token = at.i as i32;
                while token >= 0 && token as usize != key {
                    token = parents[token as usize];
                }
                token >= 0
            };
            Definition { visible: Box::new(visible), ..Definition::default() }
        });
        for (backend, split) in
            crate::judge::subset(backends.iter().flat_map(|b| SPLITS.map(|split| (b, split))))
        {
            let batch = stored.batch().with_mask(tree.as_mask());
            let outcome = run(backend, &sample, &stored, &batch, split);
            expected.assert(backend, &outcome, format_args!("{mask}, {split:?}"));
        }
    }
}

fn packed_masks_may_hide_the_last_causal_tile<B: Backend + Clone>(backends: &[B]) {
    let lens = [(200, 200)];
    let sample = Sample::random(problem(0, Mask::Full), &lens, 31);
    // the variant hides the second tile from early rows, the bits hide it from later rows, which continue after it
    let allow = |i: usize, j: usize| i < 64 || !(64..128).contains(&j);
    let bits: Vec<bool> = (0..200 * 200).map(|at| allow(at / 200, at % 200)).collect();
    let bytes = packbits(&bits, BitOrder::Little);
    let visible = move |at: LogitIndex| allow(at.i, at.j) && at.j <= at.i;
    let expected =
        Expected::by(&sample, &|_| Definition { visible: Box::new(visible), ..Definition::default() });
    let stored = Stored::new(&sample, Storage::Paged(16), 1);
    let batch = stored.batch().with_mask(PackedMask::new(&bytes));
    for (backend, split) in crate::judge::subset(backends.iter().flat_map(|b| SPLITS.map(|split| (b, split))))
    {
        let causal = PrefixLm::new(&[0]).expect("it is small");
        let inputs = (&sample, &batch, stored.cache());
        let outcome = run_batch((backend, causal), inputs, split, &mut Workspace::default());
        expected.assert(backend, &outcome, format_args!("{split:?}"));
    }
}

fn masked_nan_keys_do_not_reach_rows<B: Backend + Clone>(backends: &[B]) {
    let lens = [(9, 150)];
    let mut sample = Sample::random(problem(3, Mask::Full), &lens, 21);
    let hidden = [0, 3, 63, 64, 100, 149];
    let flags: Vec<bool> = (0..9 * 150).map(|at| !hidden.contains(&(at % 150))).collect();
    let bytes = packbits(&flags, BitOrder::Little);
    let stored = Stored::new(&sample, Storage::Paged(16), 1);
    let batch = stored.batch().with_mask(PackedMask::new(&bytes));
    let clean: Vec<_> = backends.iter().map(|b| run(b, &sample, &stored, &batch, Split::Balanced)).collect();
    let width = sample.problem.heads().kv * sample.problem.head_dim().qk;
    for (key, poison) in
        hidden.into_iter().zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().cycle())
    {
        sample.k[0][key * width..][..width].fill(poison);
        sample.v[0][key * width..][..width].fill(poison);
    }
    let poisoned = Stored::new(&sample, Storage::Paged(16), 1);
    for (backend, clean) in backends.iter().zip(clean) {
        let outcome = run(backend, &sample, &poisoned, &batch, Split::Balanced);
        assert!(outcome.o.iter().all(|o| o.is_finite()), "{}", backend.describe());
        assert_eq!(outcome.bits(), clean.bits(), "{}", backend.describe());
    }
}

fn a_window_reads_only_its_own_keys<B: Backend + Clone>(backends: &[B]) {
    let lens = [(1, 10_000), (100, 5_000)];
    for backend in backends {
        let read = |mask| {
            let sample = Sample::random(problem(1, mask), &lens, 0);
            let stored = Stored::new(&sample, Storage::Paged(16), 0);
            let attention = Attention::new(sample.problem, backend.clone()).expect("it is sound");
            attention.plan(&stored.batch()).expect("it is sound").explain()
        };
        let (causal, window) = (read(Mask::Causal), read(Mask::Window { left: 127, right: Some(0) }));
        let token = causal.kv_bytes / 15_000;
        // 128 keys of the first request and 227 of the second, rounded to full tiles
        assert!(window.kv_bytes <= (128 + 227 + 4 * 64) * token, "{window}");
        assert_eq!(window.flops / (2 * 6 * 88), 128 * 101, "{window}");
    }
}

/// Trees with lengths around the words of 64 bits, against flags.
#[test]
fn tree_masks_equal_packed_flags() {
    let mut generator = Generator::new(40);
    let trees: Vec<Vec<i32>> = [0, 1, 2, 7, 63, 64, 65, 127, 128, 130, 200, 321]
        .into_iter()
        .map(|count| (0..count).map(|token| generator.below(token + 1) as i32 - 1).collect())
        .collect();
    let mut expected = Vec::new();
    for parents in &trees {
        let mut flags = vec![false; parents.len() * parents.len()];
        for token in 0..parents.len() {
            let mut ancestor = token as i32;
            while let Ok(at) = usize::try_from(ancestor) {
                flags[token * parents.len() + at] = true;
                ancestor = parents[at];
            }
        }
        expected.extend(packbits(&flags, BitOrder::Little));
    }
    let borrowed: Vec<&[i32]> = trees.iter().map(Vec::as_slice).collect();
    let mask = TreeMask::new(&borrowed).expect("parents come first");
    assert_eq!(mask.bytes(), expected);
}

crate::judge_backends!(
    windows_agree_with_the_oracle,
    packed_masks_agree_with_the_oracle,
    packed_masks_equal_built_in_masks,
    tree_drafts_attend_to_their_ancestors,
    packed_masks_may_hide_the_last_causal_tile,
    masked_nan_keys_do_not_reach_rows,
    a_window_reads_only_its_own_keys
);
crate::judge_bodies!(
    packed_masks_equal_built_in_masks,
    masked_nan_keys_do_not_reach_rows,
    a_window_reads_only_its_own_keys
);

#[test]
fn bits_are_packed_as_numpy_packs_them() {
    let flags = [true, false, false, true, true, false, true, false, true];
    assert_eq!(packbits(&flags, BitOrder::Little), [0b0101_1001, 1]);
    assert_eq!(packbits(&flags, BitOrder::Big), [0b1001_1010, 0b1000_0000]);
    let (bytes, bounds) = tilewright::attention::segment_packbits(&flags, &[0, 3, 3, 9], BitOrder::Little)
        .expect("it is sound");
    assert_eq!((bytes.as_slice(), bounds.as_slice()), ([1, 0b0010_1011].as_slice(), [0, 1, 1, 2].as_slice()));
}
