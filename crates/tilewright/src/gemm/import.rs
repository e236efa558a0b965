//! Packed matrices from integers and scales that were quantized elsewhere, such as in a checkpoint.

use super::packed::{GROUP, PANEL_FEATURES, PackedMatrix, WeightFormat};
use crate::{Error, Result, ensure};
use half::bf16;

const OPERATOR: &str = "gemm.from_groups";

impl PackedMatrix {
    /// A quantized matrix `[out_features, in_features]` whose scale and integers for output feature `f` and inputs
    /// `32 g .. 32 (g + 1)` are `group(f, g)`. No weight is rounded.
    ///
    /// # Errors
    /// When `format` is a float format, `in_features` is not a multiple of [`GROUP`], an integer is outside the range of `format`, or
    /// memory is exhausted.
    pub fn from_groups(
        format: WeightFormat,
        [features, inputs]: [usize; 2],
        group: impl Fn(usize, usize) -> (bf16, [i8; GROUP]),
    ) -> Result<Self> {
        if let WeightFormat::Float(dtype) = format {
            return Err(Error::new(OPERATOR, format!("format = {dtype}, expected int8 or int4")));
        }
        let (low, high) = format.integer_range();
        ensure!(
            inputs.is_multiple_of(GROUP),
            OPERATOR,
            "in_features = {inputs} is not a multiple of {GROUP}, the inputs of a scale"
        );
        let groups = inputs / GROUP;
        let mut packed = Self::zeroed(format, [features, inputs])?;
        let mut panels = packed.panels_mut();
        for (feature, index) in
            (0..features).flat_map(|feature| (0..groups).map(move |index| (feature, index)))
        {
            let (scale, integers) = group(feature, index);
            if let Some(integer) = integers.iter().find(|integer| !(low..=high).contains(*integer)) {
                let message = format!(
                    "feature {feature}, group {index}: integer = {integer}, expected {low} to {high}"
                );
                return Err(Error::new(OPERATOR, message));
            }
            let (panel, lane) = (&mut panels[feature / PANEL_FEATURES], feature % PANEL_FEATURES);
            panel.scales[index * PANEL_FEATURES + lane] = scale;
            for (input, integer) in (index * GROUP..).zip(integers) {
                panel.set_integer(format, lane, input, integer);
            }
        }
        Ok(packed)
    }
}
