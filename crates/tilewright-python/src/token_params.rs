//! Parameters of tokens: numbers, or tensors with one value per token, which stay where they are.

use crate::{errors::invalid, integers::PerRow, overlap::Named, tensor::TensorArg};
use pyo3::{
    Borrowed,
    prelude::*,
    types::{PyDict, PyEllipsis, PyFloat, PyInt, PyString, PyTuple},
};
use tilewright::{
    Result, View,
    sampling::{FilterOrder, TensorParam, TensorParams},
    tensor::Integers,
};

const OPERATOR: &str = "sampling.params";

/// A number for all tokens, or a tensor.
pub(crate) enum NumberArg<T> {
    Number(T),
    /// Boxed, so that a set of parameters is moved in few bytes.
    Tensor(Box<TensorArg>),
}

/// The tensor of a parameter, if it is one.
fn tensor<T>(param: &Option<NumberArg<T>>) -> Option<&TensorArg> {
    match param {
        Some(NumberArg::Tensor(tensor)) => Some(tensor),
        _ => None,
    }
}

impl<T> NumberArg<T> {
    /// A parameter in a tuple, which is off if it is an ellipsis.
    fn optional<'py>(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Option<Self>>
    where
        T: for<'a> FromPyObject<'a, 'py>,
    {
        if object.is(PyEllipsis::get(object.py())) { Ok(None) } else { Self::new(name, object).map(Some) }
    }

    fn new<'py>(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Self>
    where
        T: for<'a> FromPyObject<'a, 'py>,
    {
        let wrong = || {
            let kind = object.get_type().to_string();
            invalid(OPERATOR, format!("{name} is of {kind}, expected a number or a tensor of one axis"))
        };
        if object.is_instance_of::<PyFloat>() || object.is_instance_of::<PyInt>() {
            return object.extract().map(Self::Number).map_err(|_| wrong());
        }
        let tensor = TensorArg::exported(object)?.filter(|tensor| tensor.shape().len() == 1);
        tensor.map(Box::new).map(Self::Tensor).ok_or_else(wrong)
    }
}

/// The parameters that a dict names; the others are off.
#[derive(Default)]
pub(crate) struct TokenParams {
    pub(crate) temperature: Option<NumberArg<f64>>,
    pub(crate) top_k: Option<NumberArg<f64>>,
    pub(crate) top_p: Option<NumberArg<f64>>,
    pub(crate) min_p: Option<NumberArg<f64>>,
    pub(crate) joint: bool,
    pub(crate) seed: Option<NumberArg<u64>>,
    pub(crate) offset: Option<NumberArg<u64>>,
    pub(crate) offset_step: u32,
}

impl<'py> FromPyObject<'_, 'py> for TokenParams {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(tuple) = object.cast::<PyTuple>() {
            return Self::of_tuple(&tuple);
        }
        let mut params = Self::default();
        for (key, value) in object.cast::<PyDict>()?.iter() {
            match &*key.cast::<PyString>()?.to_cow()? {
                "temperature" => params.temperature = Some(NumberArg::new("temperature", &value)?),
                "top_k" => params.top_k = Some(NumberArg::new("top_k", &value)?),
                "top_p" => params.top_p = Some(NumberArg::new("top_p", &value)?),
                "min_p" => params.min_p = Some(NumberArg::new("min_p", &value)?),
                "joint" => params.joint = value.extract()?,
                "seed" => params.seed = Some(NumberArg::new("seed", &value)?),
                "offset" => params.offset = Some(NumberArg::new("offset", &value)?),
                "offset_step" => params.offset_step = value.extract()?,
                other => return Err(invalid(OPERATOR, format!("{other} is not a parameter of tokens"))),
            }
        }
        Ok(params)
    }
}

impl TokenParams {
    /// The fields in order, with an ellipsis for a parameter that is off. Looking up names takes a twentieth of a draw.
    fn of_tuple(tuple: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let mut items = tuple.iter_borrowed();
        let mut next = || items.next().ok_or_else(|| invalid(OPERATOR, "a parameter is missing"));
        Ok(Self {
            temperature: NumberArg::optional("temperature", &*next()?)?,
            top_k: NumberArg::optional("top_k", &*next()?)?,
            top_p: NumberArg::optional("top_p", &*next()?)?,
            min_p: NumberArg::optional("min_p", &*next()?)?,
            joint: next()?.extract()?,
            seed: NumberArg::optional("seed", &*next()?)?,
            offset: NumberArg::optional("offset", &*next()?)?,
            offset_step: next()?.extract()?,
        })
    }

    /// The parameters as the engine takes them.
    pub(crate) fn tensors(&self, operator: &'static str) -> Result<TensorParams<'_>> {
        let plain = TensorParams::default();
        Ok(TensorParams {
            temperature: float(operator, "temperature", &self.temperature)?.unwrap_or(plain.temperature),
            top_k: match &self.top_k {
                None => plain.top_k,
                Some(NumberArg::Number(count)) => {
                    TensorParam::All(PerRow::One(*count).counts(operator, "top_k", 1)?.pop())
                }
                Some(NumberArg::Tensor(tensor)) => TensorParam::Each(tensor.integers(operator, "top_k")?),
            },
            top_p: float(operator, "top_p", &self.top_p)?.unwrap_or(plain.top_p),
            min_p: float(operator, "min_p", &self.min_p)?.unwrap_or(plain.min_p),
            order: if self.joint { FilterOrder::Joint } else { FilterOrder::TopKFirst },
            seed: counter(operator, "seed", &self.seed)?.unwrap_or(plain.seed),
            offset: counter(operator, "offset", &self.offset)?.unwrap_or(plain.offset),
            offset_step: self.offset_step,
            ..plain
        })
    }

    /// The tensors with their names.
    pub(crate) fn named(&self) -> impl Iterator<Item = Named<'_>> {
        let tensors = [
            ("temperature", tensor(&self.temperature)),
            ("top_k", tensor(&self.top_k)),
            ("top_p", tensor(&self.top_p)),
            ("min_p", tensor(&self.min_p)),
            ("seed", tensor(&self.seed)),
            ("offset", tensor(&self.offset)),
        ];
        tensors.into_iter().filter_map(|(name, tensor)| Some(tensor?.named(name)))
    }
}

fn float<'a>(
    operator: &'static str,
    name: &str,
    param: &'a Option<NumberArg<f64>>,
) -> Result<Option<TensorParam<f32, View<'a>>>> {
    Ok(match param {
        None => None,
        Some(NumberArg::Number(value)) => Some(TensorParam::All(*value as f32)),
        Some(NumberArg::Tensor(tensor)) => Some(TensorParam::Each(tensor.view(operator, name)?)),
    })
}

fn counter<'a>(
    operator: &'static str,
    name: &str,
    param: &'a Option<NumberArg<u64>>,
) -> Result<Option<TensorParam<u64, Integers<'a, u64>>>> {
    Ok(match param {
        None => None,
        Some(NumberArg::Number(value)) => Some(TensorParam::All(*value)),
        Some(NumberArg::Tensor(tensor)) => Some(TensorParam::Each(tensor.integers(operator, name)?)),
    })
}
