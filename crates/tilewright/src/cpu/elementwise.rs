//! CPU elementwise operators.

use crate::{
    Cpu, Element, Rows,
    elementwise::{ElementFunction, ElementwiseMap, ResidualSum},
    rows_mut, with_computable,
};

pub(super) fn map_in_place(cpu: &Cpu, operator: ElementwiseMap<'_>) {
    let ElementwiseMap { function, x } = operator;
    let width = x.shape()[1];
    with_computable!(x.dtype(), T => {
        cpu.each_row(rows_mut::<T>(x), width, || (), |(), _, row| match function {
            ElementFunction::Scale { factor } => map(row, |x| factor * x),
            ElementFunction::SoftCap { cap } => map(row, |x| cap * libm::tanhf(x / cap)),
        });
    });
}

fn map<T: Element>(row: &mut [T], function: impl Fn(f32) -> f32) {
    row.iter_mut().for_each(|x| *x = T::from_f32(function(x.to_f32())));
}

pub(super) fn add(cpu: &Cpu, operator: ResidualSum<'_>) {
    let ResidualSum { x, residual, out } = operator;
    let width = x.shape()[1];
    with_computable!(x.dtype(), T => {
        let rows = Rows::<T>::new(x);
        with_computable!(out.dtype(), Out => {
            let pairs: Vec<_> = rows_mut::<f32>(residual).into_iter().zip(rows_mut::<Out>(out)).collect();
            cpu.each_row(pairs, width, || (), |(), row, (residual, out)| {
                for ((sum, x), out) in residual.iter_mut().zip(rows.get(row)).zip(out.iter_mut()) {
                    *sum += x.to_f32();
                    *out = Out::from_f32(*sum);
                }
            });
        });
    });
}
