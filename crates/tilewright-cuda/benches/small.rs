//! Bytes that the kernels beside attention and products move each second, on the GPU of this machine. Without one it says so.
//!
//! 16,384 tokens of a model with hidden 4,096, 32 query and 8 KV heads of 128, a feed-forward layer of 14,336 and a vocabulary of
//! 128,256. Bytes are those that have to be moved: what is read twice or comes from a table counts once or not at all. Buffers are
//! larger than L2.

use half::bf16;
use std::error::Error;
use tilewright_cuda::Stream;
use tilewright_kernels::{
    activation::{Activation, Gated, act_and_mul},
    append::{Append, append},
    attention::merge::{Merge, merge_state, merge_states},
    norm::{Norm, fused_add_rmsnorm, rmsnorm},
    rope::{Rope, Style, rope},
    softmax::{Softmax, softmax},
};
use tilewright_ptx::{ir::Kernel, sim::Arg};

const TOKENS: usize = 16_384;
const HIDDEN: usize = 4096;
const HEADS: (usize, usize) = (32, 8);
const DIM: usize = 128;
const FEED_FORWARD: usize = 14_336;
const VOCAB: usize = 128_256;
const ROWS: usize = 256;
const PAGE_SIZE: usize = 16;
/// Launches that are timed together: one alone is over before the next could begin.
const LAUNCHES: u32 = 10;

type Outcome = Result<(), Box<dyn Error>>;

fn main() -> Outcome {
    let device = match Stream::open(0) {
        Ok(device) => device,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    println!("{} (sm_{})", device.context().limits().name, device.context().limits().arch);
    norms(&device)?;
    embeddings(&device)?;
    activations(&device)?;
    appending(&device)?;
    merging(&device)?;
    probabilities(&device)
}

/// A kernel, its grid and arguments, and the bytes that it has to move.
struct Case<'a> {
    name: &'a str,
    kernel: Kernel,
    grid: [u32; 3],
    arguments: Vec<Arg>,
    bytes: usize,
}

impl Case<'_> {
    /// The median of 15 times ten launches, one right after the other, behind ten that do not count.
    fn time(&self, device: &Stream) -> Outcome {
        let (function, stopwatch) = (device.load(&self.kernel)?, device.stopwatch()?);
        let run = || device.launch(&function, self.grid, &self.arguments);
        let ten = || (0..LAUNCHES).try_for_each(|_| run());
        ten()?;
        let time = |_| stopwatch.time(ten).map(|seconds| seconds / f64::from(LAUNCHES));
        let mut times: Vec<f64> = (0..15).map(time).collect::<Result<_, _>>()?;
        times.sort_by(f64::total_cmp);
        let speed = |time: f64| self.bytes as f64 / time * 1e-12;
        println!(
            "{:<28} {:>8.1} us  {:.3} TB/s (best {:.3})",
            self.name,
            times[7] * 1e6,
            speed(times[7]),
            speed(times[0])
        );
        Ok(())
    }
}

/// Addresses, then 32-bit numbers, then 64-bit ones.
fn arguments(addresses: &[u64], words: &[u32], wide: &[usize]) -> Vec<Arg> {
    let addresses = addresses.iter().map(|&address| Arg::U64(address));
    let words = words.iter().map(|&word| Arg::U32(word));
    addresses.chain(words).chain(wide.iter().map(|&wide| Arg::U64(wide as u64))).collect()
}

fn norms(device: &Stream) -> Outcome {
    let config = Norm { hidden: HIDDEN as u32, weight_plus_one: false };
    let elements = TOKENS * HIDDEN;
    let [x, residual, out] = [0, 1, 2].map(|_| device.filled::<bf16>(elements, 0x3c));
    let (x, residual, out, weight) = (x?, residual?, out?, device.filled::<bf16>(HIDDEN, 0x3c)?);
    let grid = [config.ctas::<bf16>(TOKENS as u32), 1, 1];
    let with_eps = |addresses: [u64; 3]| {
        let mut arguments = arguments(&addresses, &[TOKENS as u32], &[HIDDEN; 2]);
        arguments.push(Arg::F32(1e-6));
        arguments
    };
    Case {
        name: "rmsnorm",
        kernel: rmsnorm::<bf16>("rmsnorm", config)?,
        grid,
        arguments: with_eps([x.address(), weight.address(), out.address()]),
        bytes: 2 * elements * 2,
    }
    .time(device)?;
    Case {
        name: "fused_add_rmsnorm",
        kernel: fused_add_rmsnorm::<bf16>("fused_add_rmsnorm", config)?,
        grid,
        arguments: with_eps([x.address(), residual.address(), weight.address()]),
        bytes: 4 * elements * 2,
    }
    .time(device)
}

fn embeddings(device: &Stream) -> Outcome {
    let (q, k) = (TOKENS * HEADS.0 * DIM, TOKENS * HEADS.1 * DIM);
    let table = device.filled::<f32>(TOKENS * DIM, 0x3c)?;
    let positions = device.upload(&(0..TOKENS as i32).collect::<Vec<_>>())?;
    let [q_d, k_d, q_out, k_out] = [q, k, q, k].map(|len| device.filled::<bf16>(len, 0x3c));
    let (from, to) = ([q_d?, k_d?], [q_out?, k_out?]);
    let strides = [HEADS.0 * DIM, DIM, HEADS.1 * DIM, DIM];
    let rest = [table.address(), positions.address()];
    for (name, style, in_place) in [
        ("rope, halves", Style::Halves, true),
        ("rope, interleaved", Style::Interleaved, true),
        ("rope, halves, to outputs", Style::Halves, false),
    ] {
        let config = Rope {
            heads: (HEADS.0 as u32, HEADS.1 as u32),
            head_dim: DIM as u32,
            rotary_dim: DIM as u32,
            style,
            in_place,
        };
        let [from, to] = [&from, &to].map(|[q, k]| vec![q.address(), k.address()]);
        let (to, strides) = if in_place { (Vec::new(), strides.to_vec()) } else { (to, strides.repeat(2)) };
        let addresses = [&from[..], &to, &rest].concat();
        Case {
            name,
            kernel: rope::<bf16>("rope", config)?,
            grid: config.grid::<bf16>(TOKENS as u32),
            arguments: arguments(&addresses, &[TOKENS as u32], &strides),
            bytes: 2 * (q + k) * 2,
        }
        .time(device)?;
    }
    Ok(())
}

fn activations(device: &Stream) -> Outcome {
    let x = device.filled::<bf16>(TOKENS * 2 * FEED_FORWARD, 0x3c)?;
    let out = device.filled::<bf16>(TOKENS * FEED_FORWARD, 0)?;
    for (name, activation) in [
        ("silu_and_mul", Activation::Silu),
        ("gelu_and_mul", Activation::Gelu),
        ("gelu_tanh_and_mul", Activation::GeluTanh),
    ] {
        let config = Gated { activation, d: FEED_FORWARD as u32 };
        Case {
            name,
            kernel: act_and_mul::<bf16>("act_and_mul", config)?,
            grid: [TOKENS as u32, config.ctas_of_token::<bf16>(), 1],
            arguments: arguments(&[x.address(), out.address()], &[], &[2 * FEED_FORWARD, FEED_FORWARD]),
            bytes: TOKENS * 3 * FEED_FORWARD * 2,
        }
        .time(device)?;
    }
    Ok(())
}

fn appending(device: &Stream) -> Outcome {
    let (row, elements, pages) = (HEADS.1 * DIM, TOKENS * HEADS.1 * DIM, TOKENS / PAGE_SIZE);
    let [k, v, k_cache, v_cache] = [0, 1, 2, 3].map(|_| device.filled::<bf16>(elements, 0x3c));
    let (k, v, k_cache, v_cache) = (k?, v?, k_cache?, v_cache?);
    let requests = device.filled::<i32>(TOKENS, 0)?;
    let positions = device.upload(&(0..TOKENS as i32).collect::<Vec<_>>())?;
    let indptr = device.upload(&[0_u32, pages as u32])?;
    let indices = device.upload(&(0..pages as u32).rev().collect::<Vec<_>>())?;
    let config =
        Append { kv_heads: HEADS.1 as u32, head_dims: (DIM as u32, DIM as u32), page_size: PAGE_SIZE as u32 };
    let new = [k.address(), v.address(), k_cache.address(), v_cache.address()];
    let table = [requests.address(), positions.address(), indptr.address(), indices.address()];
    for (name, slot, head) in [("append, NHD", row, DIM), ("append, HND", DIM, PAGE_SIZE * DIM)] {
        let strides = [row, DIM, PAGE_SIZE * row, slot, head];
        Case {
            name,
            kernel: append::<bf16>("append", config)?,
            grid: config.grid::<bf16>(TOKENS as u32),
            arguments: arguments(&[new, table].concat(), &[TOKENS as u32], &strides.repeat(2)),
            bytes: 4 * elements * 2,
        }
        .time(device)?;
    }
    Ok(())
}

fn merging(device: &Stream) -> Outcome {
    let (rows, states) = (TOKENS * HEADS.0, 4);
    let config = Merge { head_dim: DIM as u32 };
    let v = device.filled::<bf16>(states * rows * DIM, 0x3c)?;
    let lse = device.filled::<f32>(states * rows, 0x3c)?;
    let (out, out_lse) = (device.filled::<bf16>(rows * DIM, 0)?, device.filled::<f32>(rows, 0)?);
    let second = (v.address() + (rows * DIM * 2) as u64, lse.address() + rows as u64 * 4);
    let grid = [config.ctas::<bf16>(rows as u32), 1, 1];
    let of_state = rows * (DIM * 2 + 4);
    let two = [v.address(), lse.address(), second.0, second.1, out.address(), out_lse.address()];
    Case {
        name: "merge_state",
        kernel: merge_state::<bf16>("merge_state", config)?,
        grid,
        arguments: arguments(&two, &[rows as u32], &[]),
        bytes: 3 * of_state,
    }
    .time(device)?;
    let many = [v.address(), lse.address(), out.address(), out_lse.address()];
    Case {
        name: "merge_states of 4",
        kernel: merge_states::<bf16>("merge_states", config)?,
        grid,
        arguments: arguments(&many, &[rows as u32, states as u32, HEADS.0 as u32], &[]),
        bytes: (states + 1) * of_state,
    }
    .time(device)
}

fn probabilities(device: &Stream) -> Outcome {
    let noise = |i: u32| (i.wrapping_mul(2_654_435_761) >> 16) as f32 / 4096.0;
    let logits = device.upload(&(0..(ROWS * VOCAB) as u32).map(noise).collect::<Vec<f32>>())?;
    let temperature = device.upload(&[0.8_f32; ROWS])?;
    let out = device.filled::<f32>(ROWS * VOCAB, 0)?;
    Case {
        name: "softmax",
        kernel: softmax("softmax", Softmax { vocab: VOCAB as u32 })?,
        grid: [ROWS as u32, 1, 1],
        arguments: arguments(&[logits.address(), temperature.address(), out.address()], &[], &[]),
        bytes: 2 * ROWS * VOCAB * 4,
    }
    .time(device)
}
