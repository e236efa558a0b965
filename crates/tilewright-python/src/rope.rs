//! Rotary embeddings and tables of cosines and sines.

use crate::{AnyBackend, IndexArg, TensorArg, check_separate, operator_functions, spans_overlap};
use pyo3::prelude::*;
use tilewright::{
    Error, Indices, Operator, Result,
    rope::{Rope, RopeAngles, RopeRest, RopeRotation, RopeScaling, RopeStyle},
};

const OPERATOR: &str = "rope.apply_rope";

/// The keywords of a rotary embedding. `scaling` is `None` or a name and its numbers.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct RopeFields {
    pub(crate) rotary_dim: usize,
    pub(crate) theta: f64,
    pub(crate) interleaved: bool,
    pub(crate) scaling: Option<(String, Vec<f64>)>,
}

pub(crate) fn style(interleaved: bool) -> RopeStyle {
    if interleaved { RopeStyle::Interleaved } else { RopeStyle::default() }
}

impl RopeFields {
    pub(crate) fn rope(&self) -> Result<Rope> {
        let rope = Rope::new(self.rotary_dim, self.theta)?.with_style(style(self.interleaved));
        let Some((name, numbers)) = &self.scaling else { return Ok(rope) };
        rope.with_scaling(match (name.as_str(), &numbers[..]) {
            ("linear", &[factor]) => RopeScaling::Linear { factor },
            ("llama31", &[factor, low_freq_factor, high_freq_factor, original_context]) => {
                RopeScaling::Llama31 {
                    factor,
                    low_freq_factor,
                    high_freq_factor,
                    original_context: original_context as u32,
                }
            }
            _ => {
                let text = format!(
                    "scaling = {name:?} with {} numbers, expected \"linear\" with 1 or \"llama31\" with 4",
                    numbers.len()
                );
                return Err(Error::new(OPERATOR, text));
            }
        })
    }
}

/// A table of cosines and sines, f32 `[max_positions, rotary_dim]`, and whether pairs are interleaved.
#[derive(FromPyObject)]
pub(crate) struct TableFields(TensorArg, bool);

/// The tensors and angles of a rotation; `from_q` and `from_k` are `None` for a rotation in place.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct RotationFields {
    from_q: Option<TensorArg>,
    from_k: Option<TensorArg>,
    q: TensorArg,
    k: TensorArg,
    positions: IndexArg,
    rope: Option<RopeFields>,
    table: Option<TableFields>,
}

operator_functions! {
    /// Rotates queries and keys.
    apply_rope(RotationFields);
    /// Rotates queries and keys and rounds them to 8 bits.
    apply_rope_quantized(QuantizedRotationFields);
}

impl RotationFields {
    fn run(self, backend: &AnyBackend) -> Result<()> {
        let Self { from_q, from_k, mut q, mut k, positions, rope, table } = self;
        let rope = rope.map(|rope| rope.rope()).transpose()?;
        let angles = angles(&rope, &table)?;
        let mut copied = Vec::new();
        let indices = positions.indices(OPERATOR, "position", &mut copied)?;
        let from = [from_q.as_ref(), from_k.as_ref()];
        Rotation { from, indices, angles }.apply(backend, &mut q, &mut k)
    }
}

/// The inputs of a rotation; without `from` it is in place.
pub(crate) struct Rotation<'a> {
    pub(crate) from: [Option<&'a TensorArg>; 2],
    pub(crate) indices: Indices<'a>,
    pub(crate) angles: RopeAngles<'a>,
}

impl<'a> Rotation<'a> {
    /// Rotates into `q` and `k`.
    pub(crate) fn apply(&self, backend: &AnyBackend, q: &mut TensorArg, k: &mut TensorArg) -> Result<()> {
        if spans_overlap(q, k) {
            // parts of one projection: a writable slice of each at a time
            let (mut no_q, mut no_k) = (q.emptied(1), k.emptied(1));
            self.only(0).run(backend, q, &mut no_k)?;
            return self.only(1).run(backend, &mut no_q, k);
        }
        self.run(backend, q, k)
    }

    /// The same for queries (0) or keys (1) alone; out of place, a copy of one tensor cannot overlap the other.
    fn only(&self, which: usize) -> Self {
        let mut from = self.from;
        from[1 - which] = None;
        Self { from, ..*self }
    }

    fn run(&self, backend: &AnyBackend, q: &mut TensorArg, k: &mut TensorArg) -> Result<()> {
        let from = match self.from {
            [None, None] => None,
            [from_q, from_k] => {
                let view = |from: Option<&'a TensorArg>, name| {
                    from.map(|from| from.view(OPERATOR, name)).transpose()
                };
                match [view(from_q, "q")?, view(from_k, "k")?] {
                    [Some(q), Some(k)] => Some([q, k]),
                    _ => return Err(Error::new(OPERATOR, "outputs share memory, expected separate tensors")),
                }
            }
        };
        let (q, k) = (q.view_mut(OPERATOR, "q")?, k.view_mut(OPERATOR, "k")?);
        let (positions, angles) = (self.indices, self.angles);
        RopeRotation { from, q, k, rest: None, scales: None, positions, angles }.run(backend)
    }
}

fn angles<'a>(rope: &'a Option<Rope>, table: &'a Option<TableFields>) -> Result<RopeAngles<'a>> {
    match (rope, table) {
        (Some(rope), None) => Ok(RopeAngles::Computed(rope)),
        (None, Some(TableFields(table, interleaved))) => {
            let table = table.view(OPERATOR, "cos_sin_cache")?;
            Ok(RopeAngles::Tensor { table, style: style(*interleaved) })
        }
        _ => Err(Error::new(OPERATOR, "expected either a rope or a cos_sin_cache")),
    }
}

/// The tensors, scales and angles of a rotation to 8 bits: queries and keys, then those of the elements beyond `rotary_dim`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct QuantizedRotationFields {
    from: Vec<TensorArg>,
    to: Vec<TensorArg>,
    scales: [f32; 2],
    positions: IndexArg,
    rope: Option<RopeFields>,
    table: Option<TableFields>,
}

impl QuantizedRotationFields {
    fn run(self, backend: &AnyBackend) -> Result<()> {
        let Self { from, mut to, scales, positions, rope, table } = self;
        let rope = rope.map(|rope| rope.rope()).transpose()?;
        for (at, out) in to.iter().enumerate() {
            let others = from
                .iter()
                .map(|x| x.named("an input"))
                .chain(to[..at].iter().map(|x| x.named("another output")));
            others
                .into_iter()
                .try_for_each(|other| check_separate(OPERATOR, out.named("an output"), other))?;
        }
        let (angles, mut copied) = (angles(&rope, &table)?, Vec::new());
        let positions = positions.indices(OPERATOR, "position", &mut copied)?;
        let from = from.iter().map(|from| from.view(OPERATOR, "an input")).collect::<Result<Vec<_>>>()?;
        let mut to = to
            .iter_mut()
            .map(|to| to.view_mut(OPERATOR, "an output"))
            .collect::<Result<Vec<_>>>()?
            .into_iter();
        let (from, rest) = match (&from[..], to.len()) {
            (&[q, k], 2) => ([q, k], None),
            (&[q, k, q_rest, k_rest], 4) => ([q, k], Some([q_rest, k_rest])),
            _ => {
                return Err(Error::new(
                    OPERATOR,
                    "expected two tensors, or four with a rest, and as many outputs",
                ));
            }
        };
        let mut next = || to.next().expect("their number was matched");
        let (q, k) = (next(), next());
        let rest = rest.map(|from| RopeRest { from, q: next(), k: next() });
        RopeRotation { from: Some(from), q, k, rest, scales: Some(scales), positions, angles }.run(backend)
    }
}
