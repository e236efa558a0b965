//! The kernels beside attention and products on the GPU of this machine, against their definitions in f64. Without a GPU it
//! says so. Odd shapes and timings are the simulator's; here are the sizes that models have.

use half::{bf16, f16};
use tilewright::{
    Dtype,
    activation::Activation,
    reference::{activation::act_and_mul, norm as definitions, rope as rotation, sampling},
    rope::{CosSinCache, Rope as Embedding, RopeStyle},
};
use tilewright_cuda::{Buffer, Result, Stream};
use tilewright_kernels::{
    activation as gated, append,
    attention::merge,
    norm,
    rope::{self, Angles},
    softmax::{Softmax, softmax},
    tile::Strided,
};
use tilewright_ptx::{ir::Kernel, sim::Arg, verify::Invalid};

/// Roundings, with some room for the errors of f32 before them.
const BF16: f64 = 1.01 / 256.0;
const F16: f64 = 1.02 / 2048.0;

/// The GPU, or nothing where there is none, which is said.
fn device() -> Option<Stream> {
    Stream::open(0).inspect_err(|why| println!("skipped: {why}")).ok()
}

fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 2.0
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn bf16s(len: usize, seed: u64) -> Vec<bf16> {
    noise(len, seed).into_iter().map(bf16::from_f32).collect()
}

fn f16s(len: usize, seed: u64) -> Vec<f16> {
    noise(len, seed).into_iter().map(f16::from_f32).collect()
}

fn wide<T: Copy + Into<f64>>(values: &[T]) -> Vec<f64> {
    values.iter().map(|&value| value.into()).collect()
}

/// Rows so many elements apart, of heads so many.
fn rows(address: u64, strides: [usize; 2]) -> Strided {
    Strided { address, strides: strides.map(|stride| stride as u64) }
}

fn launch(
    device: &Stream,
    kernel: std::result::Result<Kernel, Invalid>,
    grid: [u32; 3],
    arguments: &[Arg],
) -> Result<()> {
    device.launch(&device.load(&kernel.expect("a valid kernel"))?, grid, arguments)?;
    device.synchronize()
}

/// Panics where a number is not what it should be, to a relative error and an absolute one.
fn compare(what: &str, found: &[f64], expected: &[f64], (relative, absolute): (f64, f64)) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let near = (found - expected).abs() <= expected.abs() * relative + absolute;
        assert!(near || found == expected, "{what}: element {i} is {found}, not {expected}");
    }
}

#[test]
fn norms() -> Result<()> {
    let Some(device) = device() else { return Ok(()) };
    for (rows_of, hidden, weight_plus_one) in [
        (1000, 128, true),
        (300, 4096, false),
        (33, 7168, true),
        (2, 32768, false),
        (3, 100_000, false),
        (5, 1001, true),
    ] {
        let (x, residual, weight) =
            (bf16s(rows_of * hidden, 1), bf16s(rows_of * hidden, 2), bf16s(hidden, 3));
        let (x_d, residual_d) = (device.upload(&x)?, device.upload(&residual)?);
        let (weight_d, out_d) = (device.upload(&weight)?, device.filled::<bf16>(x.len(), 0xff)?);
        for (y, add) in [(&out_d, false), (&residual_d, true)] {
            let call = norm::Call {
                dtypes: (Dtype::Bf16, Dtype::Bf16),
                shape: [rows_of as u32, 1, hidden as u32],
                x: rows(x_d.address(), [hidden, 0]),
                y: rows(y.address(), [hidden, 0]),
                weight: (weight_d.address(), 1),
                eps: 1e-6,
                offset: if weight_plus_one { 1.0 } else { 0.0 },
                add,
            };
            let (grid, arguments) = call.launch();
            launch(&device, norm::norm("norm", call.norm()), grid, &arguments)?;
        }
        let offset = if weight_plus_one { 1.0 } else { 0.0 };
        let normalised = |x: &[f64]| definitions::rmsnorm(x, &wide(&weight), offset, 1e-6);
        let all = |x: &[f64]| x.chunks(hidden).flat_map(normalised).collect::<Vec<_>>();
        let sums: Vec<f64> = x.iter().zip(&residual).map(|(x, y)| x.to_f64() + y.to_f64()).collect();
        compare("rmsnorm", &wide(&out_d.download()?), &all(&wide(&x)), (BF16, 1e-6));
        compare("residual", &wide(&residual_d.download()?), &sums, (BF16, 1e-6));
        compare("fused_add_rmsnorm", &wide(&x_d.download()?), &all(&sums), (BF16, 1e-5));
    }
    Ok(())
}

#[test]
fn gated_activations() -> Result<()> {
    let Some(device) = device() else { return Ok(()) };
    let (tokens, d) = (50, 14336);
    let x: Vec<f16> = noise(tokens * 2 * d, 4).iter().map(|x| f16::from_f32(x * 4.0)).collect();
    let x_d = device.upload(&x)?;
    for activation in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
        let out_d = device.filled::<f16>(tokens * d, 0xff)?;
        let call = gated::Call {
            activation,
            dtype: Dtype::F16,
            shape: [tokens as u32, d as u32],
            x: rows(x_d.address(), [2 * d, 0]),
            out: rows(out_d.address(), [d, 0]),
        };
        let (grid, arguments) = call.launch();
        launch(&device, gated::act_and_mul("act_and_mul", call.gated()), grid, &arguments)?;
        let expected: Vec<f64> = x
            .chunks(2 * d)
            .flat_map(|token| {
                (0..d).map(|i| act_and_mul(activation, token[i].to_f64(), token[d + i].to_f64()))
            })
            .collect();
        compare(&format!("{activation:?}"), &wide(&out_d.download()?), &expected, (F16, 1e-7));
    }
    Ok(())
}

#[test]
fn rotary_embedding() -> Result<()> {
    let Some(device) = device() else { return Ok(()) };
    let (tokens, heads, dim, max_positions) = (700, (32_usize, 8_usize), 128, 9000);
    let cases = [RopeStyle::Neox, RopeStyle::Interleaved].map(|style| [(style, true), (style, false)]);
    for (style, by_table) in cases.concat() {
        let embedding = Embedding::new(dim, 500_000.0).expect("an embedding").with_style(style);
        let cache = CosSinCache::new(&embedding, max_positions);
        let table = device.upload(cache.view().as_slice::<f32>().expect("f32"))?;
        let positions: Vec<i32> = (0..tokens as i32).map(|token| token * 12 + 5).collect();
        let (q, k) = (bf16s(tokens * heads.0 * dim, 5), bf16s(tokens * heads.1 * dim, 6));
        let (q_d, k_d, positions_d) = (device.upload(&q)?, device.upload(&k)?, device.upload(&positions)?);
        let turns: Vec<u64> = embedding.frequencies().into_iter().map(rope::turns).collect();
        let turns = device.upload(&turns)?;
        let (angles, angles_at) = match by_table {
            true => (Angles::Table, table.address()),
            false => (Angles::Turns, turns.address()),
        };
        let at = [(&q_d, heads.0), (&k_d, heads.1)]
            .map(|(tensor, heads)| rows(tensor.address(), [heads * dim, dim]));
        let call = rope::Call {
            dtype: Dtype::Bf16,
            style,
            angles,
            angles_at,
            positions: positions_d.address(),
            tokens: tokens as u32,
            heads: [heads.0 as u32, heads.1 as u32],
            dims: [dim as u32; 2],
            from: at,
            to: at,
        };
        let (grid, arguments) = call.launch();
        launch(&device, rope::rope("rope", call.rope()), grid, &arguments)?;
        for (what, before, after, heads) in
            [("q", &q, q_d.download()?, heads.0), ("k", &k, k_d.download()?, heads.1)]
        {
            let rotated = before.chunks(dim).enumerate().flat_map(|(head, values)| {
                let position = f64::from(positions[head / heads]);
                let angles = (0..dim / 2).map(|pair| position * rotation::frequency(pair, dim, 500_000.0));
                rotation::rotate(&wide(values), &angles.collect::<Vec<_>>(), style)
            });
            compare(&format!("{what} {style:?}"), &wide(&after), &rotated.collect::<Vec<_>>(), (BF16, 2e-6));
        }
    }
    Ok(())
}

#[test]
fn appending_to_pages() -> Result<()> {
    let Some(device) = device() else { return Ok(()) };
    let (tokens, heads, dim, page_size) = (1000, 8, 128, 16);
    let row = heads * dim;
    let (k, v) = (bf16s(tokens * row, 7), bf16s(tokens * row, 8));
    let pages = tokens.div_ceil(page_size);
    let indices: Vec<u32> = (0..pages as u32).rev().collect();
    let requests: Vec<i32> = (0..tokens as i32).map(|token| if token % 10 == 3 { -1 } else { 0 }).collect();
    let positions: Vec<i32> = (0..tokens as i32).collect();
    let (k_d, v_d) = (device.upload(&k)?, device.upload(&v)?);
    let caches = [0, 1].map(|_| device.filled::<bf16>(pages * page_size * row, 0));
    let [k_cache, v_cache] = caches;
    let (k_cache, v_cache) = (k_cache?, v_cache?);
    let (requests_d, positions_d) = (device.upload(&requests)?, device.upload(&positions)?);
    let (indptr_d, indices_d) = (device.upload(&[0_u32, pages as u32])?, device.upload(&indices)?);
    // NHD for keys, HND for values
    let of = |new: &Buffer<bf16>, cache: &Buffer<bf16>, strides: [usize; 2]| append::Call {
        dtypes: (Dtype::Bf16, Dtype::Bf16),
        shape: [heads as u32, dim as u32],
        new: rows(new.address(), [row, dim]),
        cache: append::Cache {
            address: cache.address(),
            strides: [page_size * row, strides[0], strides[1]].map(|stride| stride as u64),
        },
        places: append::Places::Table {
            batch_indices: requests_d.address(),
            positions: positions_d.address(),
            indptr: indptr_d.address(),
            indices: indices_d.address(),
            page_size: page_size as u32,
            count: tokens as u32,
        },
        scale: None,
    };
    for call in [of(&k_d, &k_cache, [row, dim]), of(&v_d, &v_cache, [dim, page_size * dim])] {
        let (grid, arguments) = call.launch();
        launch(&device, append::append("append", call.append()), grid, &arguments)?;
    }
    for (what, new, cache, (slot_stride, head_stride)) in
        [("k", &k, k_cache.download()?, (row, dim)), ("v", &v, v_cache.download()?, (dim, page_size * dim))]
    {
        let mut expected = vec![bf16::ZERO; cache.len()];
        for token in (0..tokens).filter(|&token| requests[token] >= 0) {
            let place = (pages - 1 - token / page_size) * page_size * row + token % page_size * slot_stride;
            for head in 0..heads {
                let from = &new[token * row + head * dim..][..dim];
                expected[place + head * head_stride..][..dim].copy_from_slice(from);
            }
        }
        assert_eq!(cache.iter().zip(&expected).position(|(a, b)| a != b), None, "{what}");
    }
    Ok(())
}

/// States of `[rows, states, dim]`, merged by the definition: values, then LSE.
fn merged(states: usize, dim: usize, v: &[f64], lse: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let row = |(v, lse): (&[f64], &[f32])| {
        let max = lse.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f64> = lse.iter().map(|lse| (f64::from(*lse) - f64::from(max)).exp2()).collect();
        let sum: f64 = weights.iter().sum();
        let weighed = |d| (0..states).map(|i| weights[i] / sum * v[i * dim + d]).sum();
        ((0..dim).map(weighed).collect::<Vec<f64>>(), f64::from(max) + sum.log2())
    };
    let (v, lse): (Vec<_>, Vec<_>) = v.chunks(states * dim).zip(lse.chunks(states)).map(row).unzip();
    (v.concat(), lse)
}

#[test]
fn merging_states() -> Result<()> {
    let Some(device) = device() else { return Ok(()) };
    let (rows, states, dim) = (1500, 6, 128);
    let run = |rows: usize, states: merge::States, out: merge::State| {
        let call = merge::Call { dtype: Dtype::F16, shape: [rows as u32, 1, dim as u32], states, out };
        let config = call.merge().expect("a head that registers hold");
        let (grid, arguments) = call.launch(config);
        launch(&device, merge::merge("merge", config), grid, &arguments)
    };
    let state = |v, lse, states: usize| {
        let of_row = states as u64;
        merge::State { v, v_strides: [of_row * dim as u64, dim as u64, 1], lse, lse_strides: [of_row, 1] }
    };
    let v = f16s(rows * states * dim, 9);
    let mut lse: Vec<f32> = noise(rows * states, 10).iter().map(|lse| lse * 8.0).collect();
    lse.iter_mut().step_by(4).for_each(|lse| *lse = f32::NEG_INFINITY);
    let (v_d, lse_d) = (device.upload(&v)?, device.upload(&lse)?);
    let (out, out_lse) = (device.filled::<f16>(rows * dim, 0xff)?, device.filled::<f32>(rows, 0xff)?);
    let first = state(v_d.address(), lse_d.address(), states);
    let many = merge::States::Many { first, count: states as u32, strides: [dim as u64, 1] };
    run(rows, many, state(out.address(), out_lse.address(), 1))?;
    let (expected, expected_lse) = merged(states, dim, &wide(&v), &lse);
    compare("v of many", &wide(&out.download()?), &expected, (F16, 1e-5));
    compare("lse of many", &wide(&out_lse.download()?), &expected_lse, (1e-6, 1e-6));

    // the first two halves, as if each were a state of its own rows, into the first
    let half = rows * states / 2;
    let second = (v_d.address() + (half * dim * 2) as u64, lse_d.address() + half as u64 * 4);
    let first = state(v_d.address(), lse_d.address(), 1);
    run(half, merge::States::Two([first, state(second.0, second.1, 1)]), first)?;
    let pairs = (0..half).map(|i| {
        let at = [i, half + i];
        let v = at.map(|at| wide(&v[at * dim..][..dim])).concat();
        merged(2, dim, &v, &at.map(|at| lse[at]))
    });
    let (found, found_lse) = (v_d.download()?, lse_d.download()?);
    for (i, (expected, expected_lse)) in pairs.enumerate().filter(|(_, (_, lse))| lse[0].is_finite()) {
        compare(&format!("v of two {i}"), &wide(&found[i * dim..][..dim]), &expected, (F16, 1e-5));
        compare(&format!("lse of two {i}"), &wide(&found_lse[i..=i]), &expected_lse, (1e-6, 1e-6));
    }
    Ok(())
}

#[test]
fn softmax_of_logits() -> Result<()> {
    let Some(device) = device() else { return Ok(()) };
    for vocab in [50_257, 128_256] {
        let temperature = [1.0_f32, 0.6, 0.0, 3.0];
        let mut logits: Vec<f32> = noise(temperature.len() * vocab, 11).iter().map(|x| x * 6.0).collect();
        logits.iter_mut().step_by(9).for_each(|x| *x = f32::NEG_INFINITY);
        let (logits_d, temperature_d) = (device.upload(&logits)?, device.upload(&temperature)?);
        let out_d = device.filled::<f32>(logits.len(), 0xff)?;
        let addresses = [logits_d.address(), temperature_d.address(), out_d.address()];
        let grid = [temperature.len() as u32, 1, 1];
        let kernel = softmax("softmax", Softmax { vocab: vocab as u32 });
        launch(&device, kernel, grid, &addresses.map(Arg::U64))?;
        let rows = logits.chunks(vocab).zip(temperature);
        let expected =
            rows.flat_map(|(row, temperature)| sampling::softmax(&wide(row), f64::from(temperature)));
        let expected: Vec<f64> = expected.collect();
        compare(&format!("softmax of {vocab}"), &wide(&out_d.download()?), &expected, (2e-5, 1e-37));
    }
    Ok(())
}
