//! CPU rotary embedding: one row of cosines and sines per token, shared by its heads.

use crate::{
    Cpu, Element, View, ViewMut,
    rope::{CosSinCache, Rope, RopeStyle, fill_row},
    rows::{Rows, rows_mut, widen},
    with_dtype,
};

pub(super) fn rope(cpu: &Cpu, q: ViewMut<'_>, k: ViewMut<'_>, positions: &[i32], rope: &Rope) {
    let (dim, frequencies) = (rope.rotary_dim(), rope.frequencies());
    let mut table = vec![0.0; positions.len() * dim];
    cpu.each_row(
        table.chunks_mut(dim).collect(),
        dim,
        || (),
        |(), token, row| {
            fill_row(&frequencies, f64::from(positions[token]), row);
        },
    );
    let row = |token: usize| &table[token * dim..][..dim];
    rotate(cpu, q, rope.style(), row);
    rotate(cpu, k, rope.style(), row);
}

pub(super) fn rope_with_cos_sin_cache(
    cpu: &Cpu,
    q: ViewMut<'_>,
    k: ViewMut<'_>,
    positions: &[i32],
    cache: &CosSinCache,
) {
    let row = |token: usize| cache.row(positions[token] as usize);
    rotate(cpu, q, cache.style(), row);
    rotate(cpu, k, cache.style(), row);
}

pub(super) fn rotate_with_cos_sin_cache(
    cpu: &Cpu,
    from: [View<'_>; 2],
    to: [ViewMut<'_>; 2],
    positions: &[i32],
    cache: &CosSinCache,
) {
    let row = |token: usize| cache.row(positions[token] as usize);
    for (from, to) in from.into_iter().zip(to) {
        rotate_to(cpu, (from, to), cache.style(), row);
    }
}

/// Rotates each head of `from` in f32 and writes it to `to`, with the dimensions that are not rotated.
fn rotate_to<'t>(
    cpu: &Cpu,
    (from, to): (View<'_>, ViewMut<'_>),
    style: RopeStyle,
    angles: impl Fn(usize) -> &'t [f32] + Sync + Send,
) {
    let (heads, width) = (to.shape()[1], to.shape()[2]);
    with_dtype!(from.dtype(), From => {
        let rows = Rows::<From>::new(from);
        with_dtype!(to.dtype(), To => {
            cpu.each_row(rows_mut::<To>(to), width, Vec::new, |head_f32, row, head| {
                widen(rows.get(row), head_f32);
                let angles = angles(row / heads);
                let (cosines, sines) = angles.split_at(angles.len() / 2);
                rotate_head(&mut head_f32[..angles.len()], style, cosines, sines);
                head.iter_mut().zip(&*head_f32).for_each(|(to, &from)| *to = To::from_f32(from));
            });
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
    with_dtype!(x.dtype(), T => {
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
            left.iter_mut().zip(right).zip(angles).for_each(|((a, b), angle)| rotate_pair(a, b, angle));
        }
        RopeStyle::Interleaved => {
            let (pairs, _) = head.as_chunks_mut::<2>();
            pairs.iter_mut().zip(angles).for_each(|([a, b], angle)| rotate_pair(a, b, angle));
        }
    }
}

#[inline(always)]
fn rotate_pair<T: Element>(a: &mut T, b: &mut T, (cos, sin): (&f32, &f32)) {
    let (x, y) = (a.to_f32(), b.to_f32());
    *a = T::from_f32(x * cos - y * sin);
    *b = T::from_f32(y * cos + x * sin);
}
