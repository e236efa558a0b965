//! CPU row gather: copies table rows selected by index.

use crate::{Cpu, Element, Rows, gather::RowGather, rows_mut, with_computable};

pub(super) fn gather_rows(cpu: &Cpu, operator: RowGather<'_>) {
    let RowGather { table, ids, out } = operator;
    let (ids, width) = (ids.host().unwrap_or_default(), out.shape()[1]);
    with_computable!(table.dtype(), From => {
        let rows = Rows::<From>::new(table);
        with_computable!(out.dtype(), To => {
            cpu.each_row(rows_mut::<To>(out), width, || (), |(), at, out| {
                let row = rows.get(ids[at] as usize);
                out.iter_mut().zip(row).for_each(|(to, from)| *to = To::from_f32(from.to_f32()));
            });
        });
    });
}
