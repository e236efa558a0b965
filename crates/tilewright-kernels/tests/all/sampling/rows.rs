//! Rows for tests, on the CPU and in the simulator.

use half::{bf16, f16};
use tilewright::{Element, View, sampling::SamplingParams};
use tilewright_kernels::sampling::{Number, RequestSources, request_words};
use tilewright_ptx::{Arg, Kernel, Launch, Memory};

/// Element types of the engine and of kernels.
pub(crate) trait Both: Element + Number {}
impl Both for f32 {}
impl Both for f16 {}
impl Both for bf16 {}

/// Rows of `vocab` elements with stride `stride`, `begin` elements after an aligned address.
pub(crate) struct Rows<T> {
    pub(crate) data: Vec<T>,
    pub(crate) begin: usize,
    pub(crate) shape: [usize; 2],
    pub(crate) stride: usize,
}

impl<T: Both> Rows<T> {
    pub(crate) fn new(
        (rows, vocab): (usize, usize),
        (begin, gap): (usize, usize),
        value: impl Fn(usize, usize) -> f32,
    ) -> Self {
        let stride = vocab + gap;
        let mut data = vec![<T as Element>::from_f32(f32::NAN); begin + rows * stride];
        for row in 0..rows {
            for i in 0..vocab {
                data[begin + row * stride + i] = Element::from_f32(value(row, i));
            }
        }
        Self { data, begin, shape: [rows, vocab], stride }
    }

    /// View on the CPU.
    pub(crate) fn view(&self) -> View<'_>
    where
        for<'a> tilewright::tensor::Data<'a>: From<&'a [T]>,
    {
        View::strided(&self.data[self.begin..], &self.shape, &[self.stride, 1])
            .expect("rows inside of their memory")
    }

    /// Copies the rows to the simulator; returns the address of the first row.
    pub(crate) fn load(&self, memory: &mut Memory) -> u64 {
        memory.alloc_from(&self.data) + (self.begin * size_of::<T>()) as u64
    }
}

/// Bell-shaped numbers between -6 and 6.
pub(crate) fn bell(row: usize, i: usize) -> f32 {
    let mut state =
        (row as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (i as u64).wrapping_mul(0xD134_2543_DE82_EF95);
    let mut next = || {
        state ^= state >> 31;
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    3.0 * (next() + next() + next() + next())
}

/// Bell-shaped weights between 1 and 13.
pub(crate) fn positive(row: usize, i: usize) -> f32 {
    bell(row, i) + 7.0
}

/// A hundred large logits, then ties: a share of 0.42 is just above the mass of the large ones in rows of 3,100.
pub(crate) fn ties_of_top_k(_: usize, i: usize) -> f32 {
    if i % 31 == 5 { 3.0 } else { 0.0 }
}

/// Encodes requests in the simulator.
pub(crate) fn requests(params: &[SamplingParams], memory: &mut Memory) -> RequestSources {
    RequestSources::records(memory.alloc_from(&params.iter().flat_map(request_words).collect::<Vec<u32>>()))
}

/// Runs a kernel with one CTA or cluster per row. Odd seeds leave gaps between the arrays in shared memory, so that accesses beyond
/// the end of an array do not find its neighbor.
pub(crate) fn run(kernel: &Kernel, rows: usize, args: &[Arg], (seed, memory): (u64, &mut Memory)) {
    let mut kernel = kernel.clone();
    if seed % 2 == 1 {
        kernel.shared.iter_mut().for_each(|array| array.bytes += array.align);
    }
    let done = Launch { kernel: &kernel, grid: [rows as u32 * kernel.cluster, 1, 1], args, seed }.run(memory);
    done.unwrap_or_else(|fault| panic!("{}, seed {seed}: {fault}", kernel.name));
}
