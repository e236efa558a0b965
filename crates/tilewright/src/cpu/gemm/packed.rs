//! CPU products with packed weights: distribution of tiles or blocks of the output over threads.

use super::{Blocks, F32Rows, in_f32, with_scratch};
use crate::{
    Cpu, Dtype, View,
    cpu::simd::{
        Isa,
        panels::TILE_ROWS,
        products::{BLOCK_SCRATCH, Product, ProductInput},
    },
    gemm::{GatedLinear, PackedLinear},
};

pub(in crate::cpu) fn packed_linear(cpu: &Cpu, operator: PackedLinear<'_>) {
    let x = F32Rows::new(operator.x);
    let (direct, rounded): (Vec<_>, Vec<_>) =
        operator.products.into_iter().partition(|product| product.out.dtype() == Dtype::F32);
    let direct = direct.into_iter().filter_map(|product| Product::new(product.weight, None, product.out));
    run(cpu, x.view(), &direct.collect::<Vec<_>>());
    for product in rounded {
        let weight = product.weight;
        in_f32(cpu, product.out, |out| run(cpu, x.view(), Product::new(weight, None, out).as_slice()));
    }
}

pub(in crate::cpu) fn gated_linear(cpu: &Cpu, operator: GatedLinear<'_>) {
    let GatedLinear { x, gate, up, activation, out } = operator;
    let x = F32Rows::new(x);
    let gate = Some((gate, activation));
    in_f32(cpu, out, |out| run(cpu, x.view(), Product::new(up, gate, out).as_slice()));
}

/// Computes all products of `x`, f32, in one parallel pass.
fn run(cpu: &Cpu, x: View<'_>, products: &[Product<'_>]) {
    let &[num_rows, inputs] = x.shape() else { return };
    let (stride, Some(x)) = (x.strides()[0], x.as_slice::<f32>()) else { return };
    if num_rows == 0 {
        return;
    }
    // Without FMA, sums in registers would differ from those of the `gemm` crate, which detects instructions itself.
    let in_tiles = num_rows <= TILE_ROWS && cpu.isa != Isa::Portable;
    let rows = (0..if in_tiles { num_rows } else { 0 }).map(|row| &x[row * stride..][..inputs]).collect();
    let input = ProductInput { isa: cpu.isa, x, stride, rows };
    let blocks = |product: &Product<'_>| Blocks { rows: num_rows, features: product.num_features() };
    let num_tasks = |product| if in_tiles { Product::num_tiles(product) } else { blocks(product).len() };
    let counts: Vec<usize> = products.iter().map(num_tasks).collect();
    cpu.for_each(counts.iter().sum(), std::iter::repeat_n((), cpu.threads()), |mut task, ()| {
        for (product, &count) in products.iter().zip(&counts) {
            if task >= count {
                task -= count;
                continue;
            }
            if in_tiles {
                return product.multiply_tile(&input, task);
            }
            return with_scratch(BLOCK_SCRATCH, |scratch| {
                product.multiply_block(&input, &blocks(product).get(task), scratch);
            });
        }
    });
}
