//! Quantization with one scale per group of adjacent elements.

use crate::{InputArg, Queue, TensorArg, check_separate, fields_of_tuple, raised};
use pyo3::prelude::*;
use tilewright::{Operator, Result, quantization::GroupQuantization};

const OPERATOR: &str = "quantization.quantize_groups";

/// Rows, the size of their groups, and the tensors that receive elements and scales.
pub(crate) struct GroupQuantizationFields {
    x: TensorArg,
    group_size: usize,
    eps: f32,
    power_of_two: bool,
    out: TensorArg,
    scales: TensorArg,
}

fields_of_tuple!(GroupQuantizationFields { x, group_size, eps, power_of_two, out, scales });

impl GroupQuantizationFields {
    fn run(&mut self, queue: &Queue) -> Result<()> {
        let Self { x, group_size, eps, power_of_two, out, scales } = self;
        check_separate(OPERATOR, scales.named("scales"), x.named("x"))?;
        check_separate(OPERATOR, scales.named("scales"), out.named("out"))?;
        let x = InputArg::beside(OPERATOR, x.named("x"), out.named("out"))?;
        GroupQuantization {
            x: x.view(OPERATOR, "x")?,
            group_size: *group_size,
            eps: *eps,
            power_of_two: *power_of_two,
            out: out.view_mut(OPERATOR, "out")?,
            scales: scales.view_mut(OPERATOR, "scales")?,
        }
        .run(&queue.backend)
    }
}

/// Quantizes groups of elements to 8 bits with a scale each.
#[pyfunction]
pub(crate) fn quantize_groups(
    py: Python<'_>,
    queue: &Queue,
    mut fields: GroupQuantizationFields,
) -> PyResult<()> {
    py.detach(|| fields.run(queue)).map_err(raised)
}
