//! Tables with one list per request, concatenated, and a check of per-head table sizes.

use super::{At, Number};
use crate::{Error, Problem, Result};

/// Concatenated integer lists, one per request.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RequestLists {
    values: Vec<f32>,
    /// `[requests + 1]`: bounds of the lists.
    starts: Vec<f32>,
    /// Names of the two tables in expressions.
    names: [&'static str; 2],
}

impl RequestLists {
    /// # Errors
    /// When a value, or the total number of values, is not below 2^24.
    pub(super) fn new(operator: &'static str, names: [&'static str; 2], lists: &[Vec<u32>]) -> Result<Self> {
        let what = names[0];
        let (mut values, mut starts) = (Vec::new(), vec![0.0]);
        for (request, list) in lists.iter().enumerate() {
            for (i, &value) in list.iter().enumerate() {
                crate::ensure!(
                    value < 1 << 24,
                    operator,
                    "request {request}: {what}[{i}] = {value}, expected a number below 16777216"
                );
                values.push(value as f32);
            }
            starts.push(values.len() as f32);
        }
        crate::ensure!(
            values.len() < 1 << 24,
            operator,
            "{what} has {} elements, expected fewer than 16777216",
            values.len()
        );
        if values.is_empty() {
            // a table cannot be empty; no list contains this element
            values.push(0.0);
        }
        Ok(Self { values, starts, names })
    }

    /// Element `offset` of the current request's list, and whether it exists.
    #[inline(always)]
    pub(super) fn at<N: Number>(&self, at: &At<N>, offset: N) -> (N, N::Bool) {
        let [values, starts] = self.names;
        let start = at.read(starts, &self.starts, at.request());
        let end = at.read(starts, &self.starts, at.request() + at.number(1.0));
        let index = start + offset;
        (at.read(values, &self.values, index), at.number(0.0).le(offset) & index.lt(end))
    }
}

/// Checks that `count` is the number of query heads.
pub(super) fn check_heads(variant: &str, what: &str, count: usize, problem: &Problem) -> Result<()> {
    let heads = problem.heads().qo;
    if count == heads {
        return Ok(());
    }
    let text =
        format!("variant {variant}: {what}: {count}, expected one for each of the {heads} query heads");
    Err(Error::new("attention.new", text))
}
