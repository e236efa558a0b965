//! CPU quantization with a scale per group.

use crate::{Cpu, E4m3, E5m2, Element, Rows, quantization::GroupQuantization, rows_mut, with_computable};

pub(super) fn quantize_groups(cpu: &Cpu, mut operator: GroupQuantization<'_>) {
    match operator.out.dtype() {
        crate::Dtype::E4m3 => quantize::<E4m3>(cpu, &mut operator),
        _ => quantize::<E5m2>(cpu, &mut operator),
    }
}

fn quantize<Out: Element>(cpu: &Cpu, operator: &mut GroupQuantization<'_>) {
    let GroupQuantization { x, group_size, eps, power_of_two, out, scales } = operator;
    let (num_rows, width, num_groups) = (x.shape()[0], x.shape()[1], scales.shape()[1]);
    let scale = |group: &[f32]| scale::<Out>(group, *eps, *power_of_two);
    // scales may have any strides, so rows of them cannot be split among threads
    let mut computed = vec![0.0; out.shape()[0] * num_groups];
    with_computable!(x.dtype(), T => {
        let rows = Rows::<T>::new(*x);
        let items = rows_mut::<Out>(out.reborrow()).into_iter().zip(computed.chunks_mut(num_groups.max(1)));
        cpu.each_row(items.collect(), width, Vec::new, |wide, row, (out, scales)| {
            wide.clear();
            match row < num_rows {
                true => wide.extend(rows.get(row).iter().map(|x| x.to_f32())),
                false => wide.resize(width, 0.0),
            }
            let groups = wide.chunks(*group_size).zip(out.chunks_mut(*group_size));
            for ((group, out), to) in groups.zip(scales.iter_mut()) {
                *to = scale(group);
                out.iter_mut().zip(group).for_each(|(out, x)| *out = Out::from_f32(x / *to));
            }
        });
    });
    let strides = [scales.strides()[0], scales.strides()[1]];
    let Some(to) = scales.reborrow().into_slice::<f32>() else { return };
    for (i, scale) in computed.into_iter().enumerate() {
        to[i / num_groups * strides[0] + i % num_groups * strides[1]] = scale;
    }
}

/// The scale of a group.
fn scale<Out: Element>(group: &[f32], eps: f32, power_of_two: bool) -> f32 {
    // bits of magnitudes have the order of the magnitudes, and those of NaN are the largest
    let largest = group.iter().map(|x| x.abs().to_bits()).max().unwrap_or(0);
    let scale = f32::from_bits(largest.max(eps.to_bits())) / Out::DTYPE.max();
    match () {
        () if scale.is_nan() => f32::NAN,
        () if power_of_two => f32::from_bits((scale.to_bits() + 0x7f_ffff) & 0xff80_0000),
        () => scale,
    }
}
