//! Problems: the static shape of an attention operator, from keywords.

use crate::{Keywords, dtype::element_type, invalid, raised};
use pyo3::prelude::*;
use tilewright::{Dtype, HeadDim, Heads, KvLayout, Mask, Problem};

const OPERATOR: &str = "attention.problem";

/// A checked problem.
#[pyclass(frozen, eq, hash, skip_from_py_object, module = "tilewright._core", name = "Problem")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PyProblem(pub(crate) Problem);

/// The keywords of a problem.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct ProblemFields {
    num_qo_heads: usize,
    num_kv_heads: usize,
    head_dim_qk: usize,
    head_dim_vo: usize,
    dtype: String,
    q_dtype: Option<String>,
    out_dtype: Option<String>,
    kv_dtype: String,
    layout: String,
    causal: bool,
    window_left: Option<u32>,
    window_right: Option<u32>,
    scale: Option<f32>,
    latent: bool,
}

impl ProblemFields {
    fn mask(&self) -> PyResult<Mask> {
        match (self.causal, self.window_left, self.window_right) {
            (false, None, None) => Ok(Mask::Full),
            (true, None, None) => Ok(Mask::Causal),
            (true, Some(left), None) => Ok(Mask::Window { left, right: Some(0) }),
            (false, Some(left), right) => Ok(Mask::Window { left, right }),
            (_, _, Some(right)) => {
                let text = format!("window_right = {right}, expected it with window_left and without causal");
                Err(invalid(OPERATOR, text))
            }
        }
    }
}

/// Whether a dtype is e4m3 instead of `dtype`, which it is by default.
fn is_e4m3(name: &str, value: Option<&String>, dtype: Dtype) -> PyResult<bool> {
    match value.map(|value| element_type(OPERATOR, value)).transpose()?.filter(|value| *value != dtype) {
        None => Ok(false),
        Some(Dtype::E4m3) => Ok(true),
        Some(other) => {
            Err(invalid(OPERATOR, format!("{name} = {other}, expected {dtype} as dtype, or e4m3")))
        }
    }
}

#[pymethods]
impl PyProblem {
    #[new]
    fn new(fields: Keywords<ProblemFields>) -> PyResult<Self> {
        let Keywords(fields) = fields;
        let layout = match fields.layout.as_str() {
            "NHD" => KvLayout::Nhd,
            "HND" => KvLayout::Hnd,
            other => {
                return Err(invalid(OPERATOR, format!("layout = {other:?}, expected \"NHD\" or \"HND\"")));
            }
        };
        let (qk, vo) = (fields.head_dim_qk, fields.head_dim_vo);
        let mut builder = if fields.latent {
            Problem::latent(fields.num_qo_heads, vo, qk.saturating_sub(vo))
        } else {
            let heads = Heads { qo: fields.num_qo_heads, kv: fields.num_kv_heads };
            Problem::builder(heads, HeadDim { qk, vo })
        };
        let dtypes = (element_type(OPERATOR, &fields.dtype)?, element_type(OPERATOR, &fields.kv_dtype)?);
        builder = builder.dtypes(dtypes.0, dtypes.1).layout(layout).mask(fields.mask()?);
        if is_e4m3("q_dtype", fields.q_dtype.as_ref(), dtypes.0)? {
            builder = builder.fp8_queries();
        }
        if is_e4m3("out_dtype", fields.out_dtype.as_ref(), dtypes.0)? {
            builder = builder.fp8_outputs();
        }
        if let Some(scale) = fields.scale {
            builder = builder.scale(scale);
        }
        builder.build().map(Self).map_err(raised)
    }

    /// The factor of the logits.
    #[getter]
    fn scale(&self) -> f32 {
        self.0.scale()
    }

    fn __repr__(&self) -> String {
        self.0.to_string()
    }
}
