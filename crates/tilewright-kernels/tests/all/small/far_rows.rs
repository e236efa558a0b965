//! Offsets of 64 bits, in operators whose other tests are those of the engine on the simulated backend.
//!
//! The simulator places allocations 2^32 bytes apart: with this stride of bf16, the next row is the next allocation.

use super::simulate;
use crate::real::{assert_near, noise, wide};
use half::bf16;
use tilewright::{
    Dtype,
    reference::{activation::act_and_mul as gated, norm::rmsnorm, rope::rotate},
    rope::RopeStyle,
};
use tilewright_kernels::{
    activation::{Activation, ActivationParams, act_and_mul},
    norm::{NormParams, norm},
    rope::{Angles, RopeParams, rope},
    tile::Strided,
};
use tilewright_ptx::{Arg, Kernel, Memory};

const STRIDE: u64 = 1 << 31;
const BF16: (Dtype, Dtype) = (Dtype::Bf16, Dtype::Bf16);

/// Three rows of 16 elements, and memory of three results.
struct FarRows {
    memory: Memory,
    rows: [Vec<bf16>; 3],
    from: [u64; 3],
    to: [u64; 3],
}

impl FarRows {
    fn new() -> Self {
        let mut memory = Memory::new();
        let rows = [1, 2, 3].map(|seed| noise::<bf16>(16, seed));
        let from = rows.each_ref().map(|row| memory.alloc_from(row));
        let to = [0; 3].map(|_| memory.alloc(32));
        Self { memory, rows, from, to }
    }

    /// The rows and the results.
    fn tensors(&self) -> [Strided; 2] {
        [self.from[0], self.to[0]].map(|address| Strided { address, strides: [STRIDE, 16] })
    }

    /// Runs a kernel; results are `expected(row, values)`, and the rows are only read.
    fn check(
        mut self,
        kernel: &Kernel,
        (grid, args): ([u32; 3], Vec<Arg>),
        expected: impl Fn(usize, &[f64]) -> Vec<f64>,
    ) {
        simulate("far rows", kernel, (grid, &args), 0, &mut self.memory);
        for (i, row) in self.rows.iter().enumerate() {
            let expected = expected(i, &wide(row));
            let found: Vec<bf16> = self.memory.read(self.to[i], expected.len()).expect("a result");
            for (found, expected) in found.into_iter().zip(expected) {
                assert_near(&format!("row {i}"), found, expected, (1e-5, 2.0));
            }
            assert_eq!(self.memory.read::<bf16>(self.from[i], 16).expect("a row"), *row);
        }
    }
}

#[test]
fn norm_of_far_rows() {
    let mut far = FarRows::new();
    let weight = noise::<bf16>(16, 4);
    let [x, out] = far.tensors();
    let params = NormParams {
        dtypes: BF16,
        shape: [3, 1, 16],
        x,
        residual: None,
        out: (out, Dtype::Bf16),
        weight: (far.memory.alloc_from(&weight), 1),
        bias: None,
        scale: None,
        eps: 1e-5,
        offset: 0.0,
    };
    let kernel = norm("norm", params.config()).expect("a valid kernel");
    far.check(&kernel, params.launch(), |_, row| rmsnorm(row, &wide(&weight), 0.0, 1e-5));
}

#[test]
fn rotation_of_far_tokens() {
    let mut far = FarRows::new();
    let positions = [2, 0, 1];
    // a table of cosine and sine per position, with angles of a quarter turn
    let table: Vec<f32> = [[1.0_f32, 0.0], [0.0, 1.0], [-1.0, 0.0]]
        .iter()
        .flat_map(|[cos, sin]| [[*cos; 8], [*sin; 8]].concat())
        .collect();
    let [from, to] = far.tensors();
    let params = RopeParams {
        dtypes: BF16,
        style: RopeStyle::Neox,
        angles: Angles::Table,
        angles_address: far.memory.alloc_from(&table),
        positions: far.memory.alloc_from(&positions),
        tokens: 3,
        heads: [1, 0],
        dims: [16, 16],
        from: [from; 2],
        to: [to; 2],
        rest: None,
        factors: None,
    };
    let kernel = rope("rope", params.config()).expect("a valid kernel");
    far.check(&kernel, params.launch(), |row, head| {
        rotate(head, &[f64::from(positions[row]) * std::f64::consts::FRAC_PI_2; 8], RopeStyle::Neox)
    });
}

#[test]
fn activation_of_far_tokens() {
    let far = FarRows::new();
    let [x, out] = far.tensors();
    let params = ActivationParams { activation: Activation::Silu, dtypes: BF16, shape: [3, 8], x, out };
    let kernel = act_and_mul("act_and_mul", params.config()).expect("a valid kernel");
    far.check(&kernel, params.launch(), |_, row| {
        (0..8).map(|i| gated(Activation::Silu, row[i], row[8 + i])).collect()
    });
}
