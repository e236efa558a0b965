//! Stage parameters: one value for all rows, or one per row.

/// A parameter of a stage: one for all rows, or one per row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RowParam<'a, T> {
    /// The same for every row.
    All(T),
    /// One element per row.
    Rows(&'a [T]),
}

impl<T> From<T> for RowParam<'_, T> {
    fn from(value: T) -> Self {
        Self::All(value)
    }
}

impl<'a, T> From<&'a [T]> for RowParam<'a, T> {
    fn from(rows: &'a [T]) -> Self {
        Self::Rows(rows)
    }
}

impl<'a, T> From<&'a Vec<T>> for RowParam<'a, T> {
    fn from(rows: &'a Vec<T>) -> Self {
        Self::Rows(rows)
    }
}

impl<'a, T, const N: usize> From<&'a [T; N]> for RowParam<'a, T> {
    fn from(rows: &'a [T; N]) -> Self {
        Self::Rows(rows)
    }
}

impl<T: Copy> RowParam<'_, T> {
    /// The parameter of `row`, which must be in range.
    pub(super) fn of(&self, row: usize) -> T {
        match self {
            Self::All(value) => *value,
            Self::Rows(values) => values[row],
        }
    }

    pub(super) fn problem(&self, rows: usize, problem: impl Fn(T) -> Option<String>) -> Option<String> {
        match self {
            Self::All(value) => problem(*value),
            Self::Rows(values) if values.len() != rows => {
                Some(format!("{} elements, expected rows = {rows}", values.len()))
            }
            Self::Rows(values) => {
                let mut rows = values.iter().enumerate();
                rows.find_map(|(row, &value)| Some(format!("request {row}: {}", problem(value)?)))
            }
        }
    }
}
