//! Rotary embedding against the oracle: dtypes, shapes, strides, styles, scaling, far positions, error texts.

use crate::arrays::{Array, DTYPES, F32_UNIT, Layout};
use tilewright::{
    Backend, Cpu, Dtype, Indices, Operator, Result,
    reference::rope::{frequency, llama31_frequency, rotate},
    rope::{
        CosSinCache, Positions, Rope, RopeAngles, RopeRest, RopeRotation, RopeScaling, RopeStyle, apply_rope,
        apply_rope_with_cos_sin_cache, rotate_with_cos_sin_cache,
    },
};

const STYLES: [RopeStyle; 2] = [RopeStyle::Neox, RopeStyle::Interleaved];

/// The published scaling, except the low frequency factor, which is 1 there.
fn llama31(low_freq_factor: f64) -> RopeScaling {
    RopeScaling::Llama31 { factor: 8.0, low_freq_factor, high_freq_factor: 4.0, original_context: 8192 }
}

/// Compares with the oracle at the given frequencies.
fn check(actual: &Array, before: &Array, positions: &[i32], frequencies: &[f64], style: RopeStyle) {
    let (heads, dim) = (before.shape[1], before.shape[2]);
    let values = before.values();
    let (mut expected, mut slack) = (Vec::new(), Vec::new());
    for (row, head) in values.chunks(dim).enumerate() {
        let position = f64::from(positions[row / heads]);
        let angles: Vec<f64> = frequencies.iter().map(|f| position * f).collect();
        expected.extend(rotate(head, &angles, style));
        // cosine, sine, two products and a sum, each rounded once to f32, of numbers up to the head's maximum;
        // the angle itself has f64 accuracy
        let max = head.iter().fold(0.0f64, |a, v| a.max(v.abs()));
        slack.push(2.0 * max * (4.0 * F32_UNIT + position * 1e-15));
    }
    actual.assert_close(
        &expected,
        |i| slack[i / dim],
        &format!("{:?} {style:?} at {positions:?}", before.shape),
    );
}

fn unscaled_frequencies(rotary_dim: usize, theta: f64) -> Vec<f64> {
    (0..rotary_dim / 2).map(|pair| frequency(pair, rotary_dim, theta)).collect()
}

/// Tokens, heads and dims, rotated dims: with and without other elements and vectors; more threads per token than a CTA has; no heads.
const SHAPES: [([usize; 3], usize); 13] = [
    ([1, 1, 2], 2),
    ([3, 4, 64], 64),
    ([2, 3, 80], 32),
    ([5, 1, 6], 6),
    ([40, 8, 128], 128),
    ([2, 0, 8], 8),
    ([3, 5, 16], 16),
    ([3, 5, 128], 64),
    ([3, 5, 192], 96),
    ([3, 5, 72], 64),
    ([3, 5, 7], 6),
    ([3, 5, 30], 2),
    ([2, 150, 128], 112),
];

fn rotation_matches_the_oracle<B: Backend>([backend]: &[B; 1]) {
    for dtype in DTYPES {
        for (shape, rotary_dim) in SHAPES {
            for style in STYLES {
                for layout in [Layout::Dense, Layout::Padded, Layout::Aligned, Layout::HeadsFirst] {
                    let rope = Rope::new(rotary_dim, 10_000.0).unwrap().with_style(style);
                    let ids: Vec<i32> = (0..shape[0] as i32).map(|i| 7 * i).collect();
                    let q = Array::random(dtype, &shape, layout, 1);
                    let k = Array::random(dtype, &[shape[0], 2, shape[2]], layout, 2);
                    let (mut q_out, mut k_out) = (q.clone(), k.clone());
                    let positions = Positions::Ids(&ids);
                    apply_rope(backend, q_out.view_mut(), k_out.view_mut(), positions, &rope).unwrap();
                    let frequencies = unscaled_frequencies(rotary_dim, 10_000.0);
                    check(&q_out, &q, &ids, &frequencies, style);
                    check(&k_out, &k, &ids, &frequencies, style);

                    let cache = CosSinCache::new(&rope, 7 * shape[0] as u32).unwrap();
                    let (mut q_cached, mut k_cached) = (q.clone(), k.clone());
                    let (q_view, k_view) = (q_cached.view_mut(), k_cached.view_mut());
                    apply_rope_with_cos_sin_cache(backend, q_view, k_view, positions, &cache).unwrap();
                    check(&q_cached, &q, &ids, &frequencies, style);
                    check(&k_cached, &k, &ids, &frequencies, style);
                }
            }
        }
    }
}

/// Out-of-place rotation from f32, as in the serving engine, to 16 bits and to f32; the f32 bits equal in-place rotation.
fn rotation_to_other_tensors_rounds_once<B: Backend>([backend]: &[B; 1]) {
    for to in DTYPES {
        for ((shape, rotary_dim), style) in SHAPES.into_iter().flat_map(|s| STYLES.map(|style| (s, style))) {
            let rope = Rope::new(rotary_dim, 10_000.0).unwrap().with_style(style);
            let cache = CosSinCache::new(&rope, 7 * shape[0] as u32).unwrap();
            let ids: Vec<i32> = (0..shape[0] as i32).map(|i| 7 * i).collect();
            let k_shape = [shape[0], 2, shape[2]];
            let mut q = Array::random(Dtype::F32, &shape, Layout::Padded, 1);
            let mut k = Array::random(Dtype::F32, &k_shape, Layout::HeadsFirst, 2);
            let (mut q_out, mut k_out) =
                (Array::zeros(to, &shape, Layout::HeadsFirst), Array::zeros(to, &k_shape, Layout::Padded));
            let (views, positions) = ([q_out.view_mut(), k_out.view_mut()], Positions::Ids(&ids));
            rotate_with_cos_sin_cache(backend, [q.view(), k.view()], views, positions, &cache).unwrap();
            let frequencies = unscaled_frequencies(rotary_dim, 10_000.0);
            check(&q_out, &q, &ids, &frequencies, style);
            check(&k_out, &k, &ids, &frequencies, style);
            if to == Dtype::F32 {
                let (q_view, k_view) = (q.view_mut(), k.view_mut());
                apply_rope_with_cos_sin_cache(backend, q_view, k_view, positions, &cache).unwrap();
                assert_eq!((q_out.values(), k_out.values()), (q.values(), k.values()), "{shape:?} {style:?}");
            }
        }
    }
}

/// Queries and keys in 8 bits with a scale each, whole heads or rotated and other elements in tensors of their own.
fn rotation_to_8_bits_rounds_once<B: Backend>([backend]: &[B; 1]) {
    const DIMS: [[usize; 2]; 5] = [[4, 0], [16, 16], [64, 32], [8, 3], [6, 10]];
    for dtype in DTYPES {
        for (to, dims) in
            [Dtype::E4m3, Dtype::E5m2, Dtype::I8].iter().flat_map(|to| DIMS.map(|dims| (*to, dims)))
        {
            for (style, split) in STYLES.iter().flat_map(|style| [(*style, false), (*style, true)]) {
                check_quantized(backend, (dtype, to), dims, (style, split));
            }
        }
    }
}

fn check_quantized<B: Backend>(
    backend: &B,
    (dtype, to): (Dtype, Dtype),
    [rotary_dim, rest_dim]: [usize; 2],
    (style, split): (RopeStyle, bool),
) {
    let (ids, scales) = ([3, 0, 40], [0.01_f32, 3.0]);
    let rope = Rope::new(rotary_dim, 10_000.0).unwrap().with_style(style);
    let cache = CosSinCache::new(&rope, 41).unwrap();
    let layouts = if to == Dtype::I8 { [Layout::Dense; 2] } else { [Layout::Padded, Layout::HeadsFirst] };
    let shape = |heads, dim| [3, heads, dim];
    let whole = rotary_dim + if split { 0 } else { rest_dim };
    let heads = [5, 2];
    let x = [0, 1].map(|i| Array::random(dtype, &shape(heads[i], whole), layouts[i], i as u64));
    let rests =
        [0, 1].map(|i| Array::random(dtype, &shape(heads[i], rest_dim), layouts[1 - i], 2 + i as u64));
    let [mut q, mut k] = [0, 1].map(|i| Array::zeros(to, &shape(heads[i], whole), layouts[1 - i]));
    let [mut q_rest, mut k_rest] = [0, 1].map(|i| Array::zeros(to, &shape(heads[i], rest_dim), layouts[i]));
    let rest =
        RopeRest { from: rests.each_ref().map(Array::view), q: q_rest.view_mut(), k: k_rest.view_mut() };
    RopeRotation {
        from: Some(x.each_ref().map(Array::view)),
        q: q.view_mut(),
        k: k.view_mut(),
        rest: split.then_some(rest),
        scales: Some(scales),
        positions: Indices::from(&ids),
        angles: RopeAngles::Table(&cache),
    }
    .run(backend)
    .unwrap();
    let frequencies = unscaled_frequencies(rotary_dim, 10_000.0);
    for (i, (out, rest_out)) in [(&q, &q_rest), (&k, &k_rest)].into_iter().enumerate() {
        let (scale, what) =
            (f64::from(scales[i]), format!("{dtype} to {to} {rotary_dim}+{rest_dim} {style:?} {split} {i}"));
        let (values, slack) = (x[i].values(), |_| 2.0 * 6.0 * 8.0 * F32_UNIT / scale);
        let rotated = values.chunks(whole).enumerate().flat_map(|(row, head)| {
            let angles: Vec<f64> = frequencies.iter().map(|f| f64::from(ids[row / heads[i]]) * f).collect();
            rotate(head, &angles, style)
        });
        out.assert_quantized(&rotated.map(|x| x / scale).collect::<Vec<_>>(), slack, &what);
        if split {
            let expected: Vec<f64> = rests[i].values().iter().map(|x| x / scale).collect();
            rest_out.assert_quantized(&expected, slack, &format!("{what}: rest"));
        }
    }
}

/// The CPU's table holds exactly the values that it computes without a table.
#[test]
fn on_the_cpu_a_table_gives_the_same_bits() {
    for (shape, rotary_dim) in SHAPES {
        let (cpu, q) = (Cpu::with_threads(2).unwrap(), Array::random(Dtype::F32, &shape, Layout::Dense, 1));
        let ids: Vec<i32> = (0..shape[0] as i32).map(|i| 7 * i).collect();
        let rope = Rope::new(rotary_dim, 10_000.0).unwrap();
        let cache = CosSinCache::new(&rope, 7 * shape[0] as u32).unwrap();
        let [mut computed, mut k, mut looked_up, mut k2] = [(); 4].map(|()| q.clone());
        apply_rope(&cpu, computed.view_mut(), k.view_mut(), Positions::Ids(&ids), &rope).unwrap();
        let (q_view, k_view) = (looked_up.view_mut(), k2.view_mut());
        apply_rope_with_cos_sin_cache(&cpu, q_view, k_view, Positions::Ids(&ids), &cache).unwrap();
        assert_eq!((computed.bits(), k.bits()), (looked_up.bits(), k2.bits()));
    }
}

/// Queries and keys may differ in dtype, there may be no keys, and positions may repeat.
fn queries_and_keys_may_differ<B: Backend>([backend]: &[B; 1]) {
    let (rope, ids) = (Rope::new(16, 10_000.0).unwrap(), [3, 3, 0]);
    let frequencies = unscaled_frequencies(16, 10_000.0);
    for k_heads in [1, 0] {
        let q = Array::random(Dtype::F32, &[3, 2, 16], Layout::Dense, 1);
        let k = Array::random(Dtype::Bf16, &[3, k_heads, 16], Layout::Padded, 2);
        let (mut q_out, mut k_out) = (q.clone(), k.clone());
        apply_rope(backend, q_out.view_mut(), k_out.view_mut(), Positions::Ids(&ids), &rope).unwrap();
        check(&q_out, &q, &ids, &frequencies, RopeStyle::Neox);
        check(&k_out, &k, &ids, &frequencies, RopeStyle::Neox);
    }
}

fn elements_beyond_rotary_dim_keep_their_bits<B: Backend>([backend]: &[B; 1]) {
    let q = Array::random(Dtype::Bf16, &[2, 1, 8], Layout::Dense, 1);
    let (mut out, mut k) = (q.clone(), q.clone());
    let rope = Rope::new(4, 10_000.0).unwrap();
    apply_rope(backend, out.view_mut(), k.view_mut(), Positions::Ids(&[3, 4]), &rope).unwrap();
    for row in 0..2 {
        assert_eq!(out.bits()[8 * row + 4..][..4], q.bits()[8 * row + 4..][..4]);
        assert_ne!(out.bits()[8 * row..][..4], q.bits()[8 * row..][..4]);
    }
}

/// f32 angles have errors of up to 4e-3 radians here; f64 angles do not.
fn far_positions_are_as_accurate_as_near_ones<B: Backend>([backend]: &[B; 1]) {
    let ids = [0, 1, 8191, 8192, 100_003, 131_071, 131_072, 1_000_003, i32::MAX - 1];
    let q = Array::random(Dtype::F32, &[ids.len(), 2, 128], Layout::Dense, 1);
    let (mut out, mut k) = (q.clone(), q.clone());
    let rope = Rope::new(128, 500_000.0).unwrap();
    apply_rope(backend, out.view_mut(), k.view_mut(), Positions::Ids(&ids), &rope).unwrap();
    check(&out, &q, &ids, &unscaled_frequencies(128, 500_000.0), RopeStyle::Neox);
}

#[test]
fn the_table_holds_rounded_f64_cosines_up_to_its_last_position() {
    let cache = CosSinCache::new(&Rope::new(4, 10_000.0).unwrap(), 131_073).unwrap();
    assert_eq!(cache.view().shape(), [131_073, 4]);
    for position in [0usize, 1, 65_537, 131_072] {
        for (pair, frequency) in unscaled_frequencies(4, 10_000.0).into_iter().enumerate() {
            let angle = position as f64 * frequency;
            for (column, expected) in [(pair, angle.cos()), (2 + pair, angle.sin())] {
                let error = f64::from(cache.view().at(&[position, column])) - expected;
                assert!(error.abs() <= F32_UNIT + angle * 1e-15, "{position} {column}: {error:e}");
            }
        }
    }
}

/// The ends of the ramp are computed by hand from wavelengths of 4096 / 32 and 4096 tokens.
#[test]
fn yarn_interpolates_between_pairs() {
    let yarn = |truncate| RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_context: 4096,
        truncate,
    };
    let rope = Rope::new(32, 10_000.0).unwrap();
    let plain = rope.frequencies();
    for (truncate, first, last) in [(true, 5.0, 12.0), (false, 5.236_12, 11.256_72)] {
        let scaled = rope.with_scaling(yarn(truncate)).unwrap().frequencies();
        for (pair, (scaled, plain)) in scaled.iter().zip(&plain).enumerate() {
            let ramp = ((pair as f64 - first) / (last - first)).clamp(0.0, 1.0);
            let expected = plain * (1.0 - ramp) + plain / 4.0 * ramp;
            assert!((scaled / expected - 1.0).abs() < 1e-4, "pair {pair}: {scaled}, expected {expected}");
        }
    }
    let refused = |scaling| rope.with_scaling(scaling).unwrap_err().to_string();
    let reversed = RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 1.0,
        beta_slow: 2.0,
        original_context: 64,
        truncate: true,
    };
    assert_eq!(refused(reversed), "rope.with_scaling: beta_slow = 2 is not below beta_fast = 1");
}

#[test]
fn an_amplitude_scales_every_entry() {
    let frequencies = [1.0, 0.25, 0.0];
    let plain = CosSinCache::from_frequencies(&frequencies, 1.0, 9, RopeStyle::Neox).unwrap();
    let scaled = CosSinCache::from_frequencies(&frequencies, 1.5, 9, RopeStyle::Neox).unwrap();
    let entries = |cache: &CosSinCache| cache.view().as_slice::<f32>().unwrap().to_vec();
    let expected: Vec<f32> = entries(&plain).iter().map(|entry| entry * 1.5).collect();
    assert_eq!((entries(&scaled), scaled.rotary_dim(), scaled.max_positions()), (expected, 6, 9));
    let refused = |frequencies: &[f64], amplitude| {
        CosSinCache::from_frequencies(frequencies, amplitude, 1, RopeStyle::Neox).unwrap_err().to_string()
    };
    assert_eq!(refused(&[], 1.0), "rope.cos_sin_cache: frequencies is empty, expected one per pair");
    assert_eq!(
        refused(&[1.0], f64::NAN),
        "rope.cos_sin_cache: NaN among frequencies and amplitude is not finite"
    );
}

#[test]
fn llama31_interpolates_between_wavelengths() {
    let scaled = Rope::new(128, 500_000.0).unwrap().with_scaling(llama31(1.0)).unwrap().frequencies();
    let expected: Vec<f64> = unscaled_frequencies(128, 500_000.0)
        .into_iter()
        .map(|frequency| llama31_frequency(frequency, (8.0, 1.0, 4.0), 8192.0))
        .collect();
    let mut kinds = [0; 3];
    for (pair, (actual, expected)) in scaled.iter().zip(&expected).enumerate() {
        assert!((actual / expected - 1.0).abs() < 1e-12, "pair {pair}: {actual} instead of {expected}");
        let ratio = frequency(pair, 128, 500_000.0) / actual;
        kinds[if ratio < 1.0 + 1e-9 {
            0
        } else if ratio < 8.0 - 1e-9 {
            1
        } else {
            2
        }] += 1;
    }
    assert!(kinds.iter().all(|&count| count > 3), "kept, blended and divided: {kinds:?}");
}

fn smoothed_frequencies_match_the_oracle<B: Backend>([backend]: &[B; 1]) {
    let expected: Vec<f64> = unscaled_frequencies(128, 500_000.0)
        .into_iter()
        .map(|frequency| llama31_frequency(frequency, (8.0, 1.0, 4.0), 8192.0))
        .collect();
    let ids = [0, 5, 9000, 131_072];
    for style in STYLES {
        let rope = Rope::new(128, 500_000.0).unwrap().with_style(style).with_scaling(llama31(1.0)).unwrap();
        let q = Array::random(Dtype::F32, &[4, 2, 128], Layout::Dense, 1);
        let (mut out, mut k) = (q.clone(), q.clone());
        apply_rope(backend, out.view_mut(), k.view_mut(), Positions::Ids(&ids), &rope).unwrap();
        check(&out, &q, &ids, &expected, style);
    }
}

#[test]
fn linear_scaling_divides_positions() {
    let rope = Rope::new(8, 100.0).unwrap();
    let scaled = rope.with_scaling(RopeScaling::Linear { factor: 4.0 }).unwrap();
    let run = |rope: &Rope, position: i32| {
        let mut q = Array::random(Dtype::F32, &[1, 1, 8], Layout::Dense, 1);
        let mut k = q.clone();
        let positions = Positions::Ids(&[position]);
        apply_rope(&Cpu::with_threads(1).unwrap(), q.view_mut(), k.view_mut(), positions, rope).unwrap();
        q.bits()
    };
    assert_eq!(run(&scaled, 12), run(&rope, 3));
}

#[test]
fn offsets_count_on_within_each_request() {
    let run = |positions: Positions<'_>| {
        let mut q = Array::random(Dtype::F32, &[5, 2, 8], Layout::Dense, 1);
        let mut k = q.clone();
        let rope = Rope::new(8, 10_000.0).unwrap();
        apply_rope(&Cpu::with_threads(1).unwrap(), q.view_mut(), k.view_mut(), positions, &rope).unwrap();
        (q.bits(), k.bits())
    };
    // request 1 is empty, so its offset is ignored
    let ragged = Positions::Offsets { indptr: &[0, 3, 3, 5], offsets: &[10, -1, 0] };
    assert_eq!(run(ragged), run(Positions::Ids(&[10, 11, 12, 0, 1])));
}

#[test]
fn tokens_are_batch_and_thread_invariant() {
    let ids: Vec<i32> = (0..40).map(|i| 1000 - i).collect();
    let q = Array::random(Dtype::Bf16, &[40, 8, 128], Layout::Dense, 1);
    let rope = Rope::new(128, 10_000.0).unwrap();
    let run = |threads: usize, q: &Array, ids: &[i32]| {
        let (mut out, mut k) = (q.clone(), q.clone());
        let cpu = Cpu::with_threads(threads).unwrap();
        apply_rope(&cpu, out.view_mut(), k.view_mut(), Positions::Ids(ids), &rope).unwrap();
        assert_eq!(out.bits(), k.bits());
        out.bits()
    };
    let batch = run(4, &q, &ids);
    assert_eq!(batch, run(1, &q, &ids));
    let token: Vec<f32> = q.values()[17 * 1024..][..1024].iter().map(|&v| v as f32).collect();
    let alone = Array::new(Dtype::Bf16, &[1, 8, 128], Layout::Dense, &token);
    assert_eq!(run(4, &alone, &ids[17..18]), batch[17 * 1024..][..1024]);
}

crate::judge_backends!(
    rotation_matches_the_oracle,
    rotation_to_other_tensors_rounds_once,
    rotation_to_8_bits_rounds_once,
    queries_and_keys_may_differ,
    elements_beyond_rotary_dim_keep_their_bits,
    far_positions_are_as_accurate_as_near_ones,
    smoothed_frequencies_match_the_oracle
);

fn refusal(result: Result<()>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn refusals_of_definitions_name_what_is_wrong() {
    let text = |result: Result<Rope>| result.unwrap_err().to_string();
    assert_eq!(text(Rope::new(7, 1e4)), "rope.new: rotary_dim = 7 is not an even number above 0");
    assert_eq!(text(Rope::new(0, 1e4)), "rope.new: rotary_dim = 0 is not an even number above 0");
    assert_eq!(text(Rope::new(8, f64::NAN)), "rope.new: theta = NaN is not a finite number above 0");
    let rope = Rope::new(8, 1e4).unwrap();
    assert_eq!(
        text(rope.with_scaling(RopeScaling::Linear { factor: 0.0 })),
        "rope.with_scaling: factor = 0 is not a finite number above 0"
    );
    assert_eq!(
        text(rope.with_scaling(llama31(4.0))),
        "rope.with_scaling: low_freq_factor = 4 is not below high_freq_factor = 4"
    );
    assert_eq!(
        CosSinCache::from_table(vec![0.0; 9], 4, RopeStyle::Neox).unwrap_err().to_string(),
        "rope.cos_sin_cache: the table has 9 elements, which is no multiple of rotary_dim = 4"
    );
}

#[test]
fn refusals_of_calls_name_what_is_wrong() {
    let cpu = Cpu::with_threads(1).unwrap();
    let rope = Rope::new(8, 1e4).unwrap();
    let call = |q: &[usize], k: &[usize], positions: Positions<'_>| {
        let mut q = Array::zeros(Dtype::F32, q, Layout::Dense);
        let mut k = Array::zeros(Dtype::F32, k, Layout::Dense);
        refusal(apply_rope(&cpu, q.view_mut(), k.view_mut(), positions, &rope))
    };
    let (q, k, ids) = ([2, 4, 8], [2, 1, 8], Positions::Ids(&[0, 1]));
    assert_eq!(call(&[2, 8], &k, ids), "rope.apply: q has shape [2, 8], expected [tokens, heads, head_dim]");
    assert_eq!(
        call(&q, &[3, 1, 8], ids),
        "rope.apply: k has shape [3, 1, 8], expected [tokens, heads, head_dim] = [2, _, 8]"
    );
    assert_eq!(call(&[2, 4, 6], &[2, 1, 6], ids), "rope.apply: rotary_dim = 8 is above head_dim = 6");
    assert_eq!(
        call(&q, &k, Positions::Ids(&[0])),
        "rope.apply: positions has 1 elements, expected tokens = 2"
    );
    assert_eq!(
        call(&q, &k, Positions::Ids(&[0, -1])),
        "rope.apply: token 1: position = -1 is not in 0..2147483647"
    );
    let offsets = |indptr, offsets| call(&q, &k, Positions::Offsets { indptr, offsets });
    assert_eq!(
        offsets(&[0, 2], &[]),
        "rope.apply: indptr has 2 elements, expected one more than the 0 of offsets"
    );
    assert_eq!(offsets(&[0, 3], &[0]), "rope.apply: indptr runs from 0 to 3, expected from 0 to tokens = 2");
    assert_eq!(offsets(&[0, 3, 2], &[0, 0]), "rope.apply: request 1: indptr falls from 3 to 2");
    // before any position is expanded
    let falls = offsets(&[0, i32::MAX, 2], &[0, 0]);
    assert_eq!(falls, "rope.apply: request 1: indptr falls from 2147483647 to 2");
    assert_eq!(
        offsets(&[0, 2], &[i32::MAX - 1]),
        "rope.apply: request 0: positions 2147483646..2147483648 are not in 0..2147483647"
    );

    let cache = CosSinCache::from_table(vec![0.0; 8 * 10], 8, RopeStyle::Neox).unwrap();
    let mut q = Array::zeros(Dtype::F32, &q, Layout::Dense);
    let mut k = Array::zeros(Dtype::F32, &k, Layout::Dense);
    let positions = Positions::Ids(&[9, 10]);
    let error = apply_rope_with_cos_sin_cache(&cpu, q.view_mut(), k.view_mut(), positions, &cache);
    assert_eq!(refusal(error), "rope.apply_with_cos_sin_cache: token 1: position = 10 is not in 0..10");
    let to = |k_out: &[usize], ids: &[i32]| {
        let (mut q_out, mut k_out) = (q.clone(), Array::zeros(Dtype::Bf16, k_out, Layout::Dense));
        let (from, to) = ([q.view(), k.view()], [q_out.view_mut(), k_out.view_mut()]);
        refusal(rotate_with_cos_sin_cache(&cpu, from, to, Positions::Ids(ids), &cache))
    };
    let shape = k.view().shape().to_vec();
    let text = to(&shape, &[9, 10]);
    assert_eq!(text, "rope.rotate_with_cos_sin_cache: token 1: position = 10 is not in 0..10");
    let text = to(&[1, 1, 8], &[8, 9]);
    let expected = format!("expected [tokens, heads, head_dim] = {shape:?}");
    assert_eq!(text, format!("rope.rotate_with_cos_sin_cache: k_out has shape [1, 1, 8], {expected}"));
}

#[test]
fn refusals_of_rests_and_scales_name_what_is_wrong() {
    let cpu = Cpu::with_threads(1).unwrap();
    let cache = CosSinCache::new(&Rope::new(4, 10_000.0).unwrap(), 8).unwrap();
    let of = |dtype, dim| Array::zeros(dtype, &[1, 1, dim], Layout::Dense);
    let refuse = |to, scales, dim, rest: Option<(Array, Array)>| {
        let (from, [mut q, mut k]) = (of(Dtype::F16, dim), [of(to, dim), of(to, dim)]);
        let mut rests = rest.map(|(from, to)| (from, to.clone(), to));
        let rest = rests.as_mut().map(|(from, q, k)| RopeRest {
            from: [from.view(); 2],
            q: q.view_mut(),
            k: k.view_mut(),
        });
        let (q, k, positions) = (q.view_mut(), k.view_mut(), Indices::from(&[1]));
        let from = Some([from.view(); 2]);
        let rotation =
            RopeRotation { from, q, k, rest, scales, positions, angles: RopeAngles::Table(&cache) };
        let text = rotation.run(&cpu).unwrap_err().to_string();
        text.strip_prefix("rope.rotate_with_cos_sin_cache: ").expect("the operator").to_owned()
    };
    let (f16, e4m3, one) = (Dtype::F16, Dtype::E4m3, Some([1.0, 1.0]));
    assert_eq!(refuse(e4m3, None, 4, None), "q_out is e4m3, expected f32, f16 or bf16");
    assert_eq!(refuse(f16, one, 4, None), "q_out is f16, with scales it must have 8 bits");
    assert_eq!(refuse(e4m3, Some([1.0, 0.0]), 4, None), "scale = 0 is not a finite number above 0");
    let rest = |from, to| Some((from, to));
    let text = refuse(e4m3, one, 6, rest(of(f16, 2), of(e4m3, 2)));
    assert_eq!(text, "head_dim = 6 beside a rest, expected rotary_dim = 4");
    let text = refuse(e4m3, one, 4, rest(of(Dtype::Bf16, 2), of(e4m3, 2)));
    assert_eq!(text, "q_rest is bf16, expected f16");
    let text = refuse(e4m3, one, 4, rest(of(f16, 2), of(Dtype::E5m2, 2)));
    assert_eq!(text, "q_rest_out is e5m2, expected e4m3");
    let text = refuse(e4m3, one, 4, rest(of(f16, 2), of(e4m3, 3)));
    assert_eq!(text, "q_rest_out has shape [1, 1, 3], expected [tokens, heads, head_dim] = [1, 1, 2]");
    let mut both = [of(Dtype::F16, 4), of(Dtype::F16, 4)];
    let [q, k] = both.each_mut().map(Array::view_mut);
    let angles = RopeAngles::Table(&cache);
    let in_place =
        RopeRotation { from: None, q, k, rest: None, scales: one, positions: Indices::from(&[1]), angles };
    let text = in_place.run(&cpu).unwrap_err().to_string();
    assert_eq!(text, "rope.apply_with_cos_sin_cache: a rotation in place has neither scales nor a rest");
}
