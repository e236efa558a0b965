//! CPU rotary embedding: one row of cosines and sines per token, shared by its heads.

use crate::{
    Cpu, Element, Rows, View, ViewMut,
    rope::{Rope, RopeAngles, RopeRest, RopeRotation, RopeStyle, fill_row},
    rows_mut, widen_row, with_computable, with_dtype,
};

pub(super) fn rope(cpu: &Cpu, operator: RopeRotation<'_>) {
    let RopeRotation { from, q, k, rest, scales, positions, angles } = operator;
    let (positions, dim) = (positions.host().unwrap_or_default(), angles.rotary_dim());
    let computed = match angles {
        RopeAngles::Computed(rope) => compute_table(cpu, rope, positions),
        RopeAngles::Table(_) | RopeAngles::Tensor { .. } => Vec::new(),
    };
    let row = |token: usize| match angles {
        RopeAngles::Computed(_) => &computed[token * dim..][..dim],
        RopeAngles::Table(cache) => cache.row(positions[token] as usize),
        RopeAngles::Tensor { table, .. } => Rows::new(table).get(positions[token] as usize),
    };
    let [q_from, k_from] = from.map_or([None; 2], |from| from.map(Some));
    let factors = scales.map_or([1.0; 2], |scales| scales.map(|scale| 1.0 / scale));
    for (from, to, factor) in [(q_from, q, factors[0]), (k_from, k, factors[1])] {
        match from {
            Some(from) => copy_scaled(cpu, from, to, factor, |head, token| {
                let (cosines, sines) = row(token).split_at(dim / 2);
                rotate_head(&mut head[..dim], angles.style(), cosines, sines);
            }),
            None => rotate(cpu, to, angles.style(), row),
        }
    }
    if let Some(RopeRest { from, q, k }) = rest {
        for ((from, to), factor) in from.into_iter().zip([q, k]).zip(factors) {
            copy_scaled(cpu, from, to, factor, |_, _| {});
        }
    }
}

/// Cosines and sines of each position.
fn compute_table(cpu: &Cpu, rope: &Rope, positions: &[i32]) -> Vec<f32> {
    let (dim, frequencies) = (rope.rotary_dim(), rope.frequencies());
    let mut table = vec![0.0; positions.len() * dim];
    let rows = table.chunks_mut(dim).collect();
    cpu.each_row(rows, dim, || (), |(), token, row| fill_row(&frequencies, f64::from(positions[token]), row));
    table
}

/// Writes each head of `from`, changed by `edit` in f32 and multiplied by `factor`, to `to`.
fn copy_scaled(
    cpu: &Cpu,
    from: View<'_>,
    to: ViewMut<'_>,
    factor: f32,
    edit: impl Fn(&mut [f32], usize) + Sync + Send,
) {
    let (heads, width) = (to.shape()[1], to.shape()[2]);
    with_dtype!(to.dtype(), To => {
        cpu.each_row(rows_mut::<To>(to), width, Vec::new, |head_f32, row, head| {
            widen_row(from, row, head_f32);
            edit(head_f32, row / heads);
            head.iter_mut().zip(&*head_f32).for_each(|(to, &from)| *to = To::from_f32(from * factor));
        });
    });
}

/// Rotates each head of `x` in place by the cosines and sines that `angles` returns for its token.
fn rotate<'t>(
    cpu: &Cpu,
    x: ViewMut<'_>,
    style: RopeStyle,
    angles: impl Fn(usize) -> &'t [f32] + Sync + Send,
) {
    let (heads, width) = (x.shape()[1], x.shape()[2]);
    with_computable!(x.dtype(), T => {
        cpu.each_row(rows_mut::<T>(x), width, || (), |(), row, head| {
            let angles = angles(row / heads);
            let (cosines, sines) = angles.split_at(angles.len() / 2);
            rotate_head(&mut head[..angles.len()], style, cosines, sines);
        });
    });
}

fn rotate_head<T: Element>(head: &mut [T], style: RopeStyle, cosines: &[f32], sines: &[f32]) {
    let angles = cosines.iter().zip(sines);
    match style {
        RopeStyle::Neox => {
            let (left, right) = head.split_at_mut(cosines.len());
            left.iter_mut()
                .zip(right)
                .zip(angles)
                .for_each(|((a, b), (cos, sin))| rotate_pair(a, b, *cos, *sin));
        }
        RopeStyle::Interleaved => {
            let (pairs, _) = head.as_chunks_mut::<2>();
            pairs.iter_mut().zip(angles).for_each(|([a, b], (cos, sin))| rotate_pair(a, b, *cos, *sin));
        }
    }
}

#[inline(always)]
fn rotate_pair<T: Element>(a: &mut T, b: &mut T, cos: f32, sin: f32) {
    let (x, y) = (a.to_f32(), b.to_f32());
    *a = T::from_f32(x * cos - y * sin);
    *b = T::from_f32(y * cos + x * sin);
}
