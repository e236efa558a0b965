//! Token positions.

use crate::{Result, tensor::Indices};

/// The positions of `tokens` tokens; none may be negative.
#[derive(Debug, Clone, Copy)]
pub enum Positions<'a> {
    /// A ragged batch: token `indptr[r] + i` of request `r` has position `offsets[r] + i`.
    Offsets {
        /// `[requests + 1]`, non-decreasing from 0 to `tokens`.
        indptr: &'a [i32],
        /// `[requests]`: the position of each request's first token.
        offsets: &'a [i32],
    },
    /// `[tokens]`: the position of each token.
    Ids(&'a [i32]),
    /// `[tokens]`: the same, on the host or on a device, where they are not checked.
    Indices(Indices<'a>),
}

pub(super) enum TokenPositions<'a> {
    Borrowed(Indices<'a>),
    Expanded(Vec<i32>),
}

impl TokenPositions<'_> {
    pub(super) fn indices(&self) -> Indices<'_> {
        match self {
            Self::Borrowed(ids) => *ids,
            Self::Expanded(ids) => ids.into(),
        }
    }
}

impl<'a> Positions<'a> {
    /// One position per token, not yet checked.
    pub(super) fn expand(self, operator: &'static str, tokens: usize) -> Result<TokenPositions<'a>> {
        Ok(match self {
            Self::Ids(ids) => TokenPositions::Borrowed(ids.into()),
            Self::Indices(ids) => TokenPositions::Borrowed(ids),
            Self::Offsets { indptr, offsets } => {
                TokenPositions::Expanded(expand(operator, indptr, offsets, tokens)?)
            }
        })
    }
}

fn expand(operator: &'static str, indptr: &[i32], offsets: &[i32], tokens: usize) -> Result<Vec<i32>> {
    crate::ensure!(
        indptr.len() == offsets.len() + 1,
        operator,
        "indptr has {} elements, expected one more than the {} of offsets",
        indptr.len(),
        offsets.len()
    );
    crate::ensure!(
        indptr[0] == 0 && usize::try_from(indptr[offsets.len()]) == Ok(tokens),
        operator,
        "indptr runs from {} to {}, expected from 0 to tokens = {tokens}",
        indptr[0],
        indptr[offsets.len()]
    );
    for (request, (bounds, &offset)) in indptr.windows(2).zip(offsets).enumerate() {
        let length = i64::from(bounds[1]) - i64::from(bounds[0]);
        crate::ensure!(
            length >= 0,
            operator,
            "request {request}: indptr falls from {} to {}",
            bounds[0],
            bounds[1]
        );
        let end = i64::from(offset) + length;
        crate::ensure!(
            length == 0 || offset >= 0 && end <= i64::from(i32::MAX),
            operator,
            "request {request}: positions {offset}..{end} are not in 0..{}",
            i32::MAX
        );
    }
    // no bound is beyond the last one, so there are as many positions as tokens
    let mut ids = Vec::with_capacity(tokens);
    for (bounds, &offset) in indptr.windows(2).zip(offsets) {
        ids.extend((offset..).take((bounds[1] - bounds[0]) as usize));
    }
    Ok(ids)
}
