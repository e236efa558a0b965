//! CPU products with packed weights: distribution of tiles or blocks of the output over threads.

use super::{Blocks, F32Rows, in_f32, with_scratch};
use crate::{
    Cpu, Dtype, View,
    cpu::simd::{BLOCK_SCRATCH, Bf16Mma, Isa, Product, ProductInput, RoundedRows, TILE_ROWS},
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
    // Without FMA, sums in registers would differ from those of the `gemm-f32` crate, which detects instructions itself.
    let few_rows = num_rows <= TILE_ROWS && cpu.isa != Isa::Portable;
    let mma = Bf16Mma::new(cpu.isa).filter(|_| inputs > 0 && products.iter().any(Product::is_int4));
    let rows = (0..num_rows).map(|row| &x[row * stride..][..inputs]);
    let rounded = mma.map(|mma| RoundedRows::new(mma, rows.clone(), inputs));
    let rows = if few_rows { rows.collect() } else { Vec::new() };
    let input = ProductInput { isa: cpu.isa, x, stride, num_rows, rows, rounded };
    let blocks = |product: &Product<'_>| Blocks { rows: num_rows, features: product.num_features() };
    let in_tiles = |product: &Product<'_>| few_rows || (mma.is_some() && product.is_int4());
    let num_tasks = |product: &Product<'_>| {
        if in_tiles(product) { product.num_tiles(num_rows) } else { blocks(product).len() }
    };
    let counts: Vec<usize> = products.iter().map(num_tasks).collect();
    let total: usize = counts.iter().sum();
    cpu.for_each(total, std::iter::repeat_n((), cpu.threads()), |mut task, ()| {
        let found = products.iter().zip(&counts).find(|&(_, &count)| {
            let found = task < count;
            task -= if found { 0 } else { count };
            found
        });
        let Some((product, _)) = found else { return };
        if in_tiles(product) {
            product.multiply_tile(&input, task);
        } else {
            with_scratch(BLOCK_SCRATCH, |scratch| {
                product.multiply_block(&input, &blocks(product).get(task), scratch);
            });
        }
    });
}
