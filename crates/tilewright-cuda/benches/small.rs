//! Memory throughput of the memory-bound kernels (all except attention and large products) on the GPU of this machine. Skipped
//! without a GPU.
//!
//! 16,384 tokens of a model with hidden 4,096, 32 query and 8 KV heads of 128, a feed-forward layer of 14,336 and a vocabulary of
//! 128,256. Bytes are the compulsory traffic: repeated reads count once, small tables not at all. Buffers exceed L2; for products
//! of few rows only the largest weight does.

mod gpu;

use half::bf16;
use std::error::Error;
use tilewright::{Dtype, rope::RopeStyle};
use tilewright_cuda::Stream;
use tilewright_kernels::{
    activation::{self, Activation},
    append,
    attention::kernel::merge,
    gemm::{GemmParams, Matrix},
    norm,
    rope::{self, Angles},
    tile::Strided,
};
use tilewright_ptx::{Arg, Kernel};

const BF16: Dtype = Dtype::Bf16;
const TOKENS: usize = 16_384;
const HIDDEN: usize = 4096;
const HEADS: (usize, usize) = (32, 8);
const DIM: usize = 128;
const FEED_FORWARD: usize = 14_336;
const VOCAB: usize = 128_256;
const PAGE_SIZE: usize = 16;
/// Launches timed together, because one alone ends before the next could start.
const LAUNCHES: u32 = 10;

type Outcome = Result<(), Box<dyn Error>>;

fn main() -> Outcome {
    let Some(device) = gpu::or_skip(Stream::open(0)) else { return Ok(()) };
    println!("{} (sm_{})", device.context().properties().name, device.context().properties().arch);
    norms(&device)?;
    embeddings(&device)?;
    activations(&device)?;
    appending(&device)?;
    merging(&device)?;
    decoding(&device)
}

/// A kernel, its grid and arguments, and its compulsory traffic.
struct Case<'a> {
    name: &'a str,
    kernel: Kernel,
    grid: [u32; 3],
    arguments: Vec<Arg>,
    bytes: usize,
}

impl Case<'_> {
    /// The median of 15 measurements of ten consecutive launches, after ten for warm-up.
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

/// Rows and heads with these strides in elements.
fn rows(address: u64, strides: [usize; 2]) -> Strided {
    Strided { address, strides: strides.map(|stride| stride as u64) }
}

fn norms(device: &Stream) -> Outcome {
    let elements = TOKENS * HIDDEN;
    let [x, residual, out] = [0, 1, 2].map(|_| device.filled::<bf16>(elements, 0x3c));
    let (x, residual, out, weight) = (x?, residual?, out?, device.filled::<bf16>(HIDDEN, 0x3c)?);
    let [x, residual, out] = [&x, &residual, &out].map(|tensor| rows(tensor.address(), [HIDDEN, 0]));
    for (name, add, to) in [("rmsnorm", None, out), ("fused_add_rmsnorm", Some((residual, BF16)), x)] {
        let call = norm::NormParams {
            dtypes: (BF16, BF16),
            shape: [TOKENS as u32, 1, HIDDEN as u32],
            x,
            residual: add,
            out: (to, BF16),
            weight: (weight.address(), 1),
            bias: None,
            scale: None,
            eps: 1e-6,
            offset: 0.0,
        };
        let (grid, arguments) = call.launch();
        let (kernel, tensors) = (norm::norm("norm", call.config())?, if add.is_some() { 4 } else { 2 });
        Case { name, kernel, grid, arguments, bytes: tensors * elements * 2 }.time(device)?;
    }
    Ok(())
}

fn embeddings(device: &Stream) -> Outcome {
    let (q, k) = (TOKENS * HEADS.0 * DIM, TOKENS * HEADS.1 * DIM);
    let table = device.filled::<f32>(TOKENS * DIM, 0x3c)?;
    let positions = device.upload(&(0..TOKENS as i32).collect::<Vec<_>>())?;
    let [q_d, k_d, q_out, k_out] = [q, k, q, k].map(|len| device.filled::<bf16>(len, 0x3c));
    let (from, to) = ([q_d?, k_d?], [q_out?, k_out?]);
    for (name, style, angles, in_place) in [
        ("rope, halves", RopeStyle::Neox, Angles::Table, true),
        ("rope, interleaved", RopeStyle::Interleaved, Angles::Table, true),
        ("rope, halves, computed", RopeStyle::Neox, Angles::Turns, true),
        ("rope, halves, to outputs", RopeStyle::Neox, Angles::Table, false),
    ] {
        let [from, to] = [&from, if in_place { &from } else { &to }]
            .map(|[q, k]| [rows(q.address(), [HEADS.0 * DIM, DIM]), rows(k.address(), [HEADS.1 * DIM, DIM])]);
        let call = rope::RopeParams {
            dtypes: (BF16, BF16),
            style,
            angles,
            angles_address: table.address(),
            positions: positions.address(),
            tokens: TOKENS as u32,
            heads: [HEADS.0 as u32, HEADS.1 as u32],
            dims: [DIM as u32; 2],
            from,
            to,
            rest: None,
            factors: None,
        };
        let (grid, arguments) = call.launch();
        let kernel = rope::rope("rope", call.config())?;
        Case { name, kernel, grid, arguments, bytes: 2 * (q + k) * 2 }.time(device)?;
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
        let call = activation::ActivationParams {
            activation,
            dtypes: (BF16, BF16),
            shape: [TOKENS as u32, FEED_FORWARD as u32],
            x: rows(x.address(), [2 * FEED_FORWARD, 0]),
            out: rows(out.address(), [FEED_FORWARD, 0]),
        };
        let (grid, arguments) = call.launch();
        let kernel = activation::act_and_mul("act_and_mul", call.config())?;
        Case { name, kernel, grid, arguments, bytes: TOKENS * 3 * FEED_FORWARD * 2 }.time(device)?;
    }
    Ok(())
}

fn appending(device: &Stream) -> Outcome {
    let (row, elements, pages) = (HEADS.1 * DIM, TOKENS * HEADS.1 * DIM, TOKENS / PAGE_SIZE);
    let [k, cache] = [0, 1].map(|_| device.filled::<bf16>(elements, 0x3c));
    let (k, cache) = (k?, cache?);
    // pages in descending order
    let number = |token: usize| ((pages - 1 - token / PAGE_SIZE) * PAGE_SIZE + token % PAGE_SIZE) as i64;
    let numbers = device.upload(&(0..TOKENS).map(number).collect::<Vec<_>>())?;
    let slot_mapping = append::SlotMapping::Numbers {
        numbers: numbers.address(),
        page_size: PAGE_SIZE as u32,
        num_slots: (pages * PAGE_SIZE) as u32,
        count: TOKENS as u32,
    };
    let scale = append::Scale { at: 0, page_stride: 0, head_stride: 0, factor: 0.5 };
    for (name, [slot, head], dtype) in [
        ("append, NHD", [row, DIM], BF16),
        ("append, HND", [DIM, PAGE_SIZE * DIM], BF16),
        ("append, NHD, to e4m3", [row, DIM], Dtype::E4m3),
        ("append, NHD, to int8", [row, DIM], Dtype::I8),
    ] {
        let call = append::AppendParams {
            dtypes: (BF16, dtype),
            shape: [HEADS.1 as u32, DIM as u32],
            new: rows(k.address(), [row, DIM]),
            cache: append::Cache {
                address: cache.address(),
                strides: [PAGE_SIZE * row, slot, head].map(|stride| stride as u64),
            },
            slot_mapping,
            scale: (dtype != BF16).then_some(scale),
        };
        let (grid, arguments) = call.launch();
        let kernel = append::append("append", call.config())?;
        Case { name, kernel, grid, arguments, bytes: elements * (2 + dtype.size()) }.time(device)?;
    }
    Ok(())
}

fn merging(device: &Stream) -> Outcome {
    let (rows, states) = (TOKENS * HEADS.0, 4);
    let v = device.filled::<bf16>(states * rows * DIM, 0x3c)?;
    let lse = device.filled::<f32>(states * rows, 0x3c)?;
    let (out, out_lse) = (device.filled::<bf16>(rows * DIM, 0)?, device.filled::<f32>(rows, 0)?);
    let of_state = rows * (DIM * 2 + 4);
    let state = |v, lse, states: usize| {
        let [row, dim] = [states * HEADS.0 * DIM, DIM].map(|n| n as u64);
        let lse_strides = [(states * HEADS.0) as u64, 1];
        merge::StateTensor { v, v_strides: [row, dim, 1], lse, lse_strides }
    };
    let second = state(v.address() + (rows * DIM * 2) as u64, lse.address() + rows as u64 * 4, 1);
    let many = merge::MergeInputs::Strided {
        first: state(v.address(), lse.address(), states),
        count: states as u32,
        strides: [HEADS.0 * DIM, HEADS.0].map(|stride| stride as u64),
    };
    let two = merge::MergeInputs::Pair([state(v.address(), lse.address(), 1), second]);
    for (name, states, count) in [("merge_state", two, 2), ("merge_states of 4", many, states)] {
        let out = state(out.address(), out_lse.address(), 1);
        let call =
            merge::MergeParams { dtype: BF16, shape: [TOKENS, HEADS.0, DIM].map(|n| n as u32), states, out };
        let config = call.config().ok_or("a head that registers do not hold")?;
        let (grid, arguments) = call.launch(config);
        let kernel = merge::merge("merge", config)?;
        Case { name, kernel, grid, arguments, bytes: (count + 1) * of_state }.time(device)?;
    }
    Ok(())
}

/// Decode products are bound by the bandwidth of the weights.
fn decoding(device: &Stream) -> Outcome {
    let properties = device.context().properties();
    let (arch, multiprocessors) = (properties.arch, properties.multiprocessors);
    for (name, rows, features, inputs) in [
        ("linear, 1 row", 1, FEED_FORWARD, HIDDEN),
        ("linear, 4 rows", 4, FEED_FORWARD, HIDDEN),
        ("linear, 16 rows", 16, FEED_FORWARD, HIDDEN),
        ("linear, 32 rows", 32, FEED_FORWARD, HIDDEN),
        ("linear, 1 row, to hidden", 1, HIDDEN, FEED_FORWARD),
        ("linear, 1 row, to logits", 1, VOCAB, HIDDEN),
    ] {
        let [x, weight, out] =
            [rows * inputs, features * inputs, rows * features].map(|len| device.filled::<bf16>(len, 0x3c));
        let (x, weight, out) = (x?, weight?, out?);
        let matrix = |address, stride: usize| Matrix { dtype: BF16, address, stride: stride as u64 };
        let product = GemmParams {
            shape: [rows, features, inputs].map(|n| n as u32),
            x: matrix(x.address(), inputs),
            weight: matrix(weight.address(), inputs),
            bias: None,
            out: matrix(out.address(), features),
            groups: None,
        };
        let choice = product.choose_kernel(arch, multiprocessors);
        let (grid, arguments) = product.launch(choice, multiprocessors);
        let kernel = choice.kernel("linear")?;
        Case { name, kernel, grid, arguments, bytes: features * inputs * 2 }.time(device)?;
    }
    Ok(())
}
