//! Kernel parameters: [`params!`](crate::params!) declares them once, for the host and for the kernel.

use tilewright_ptx::{Arg, Builder, Global, Stored, TensorMap, Value};

/// The type of a kernel parameter, or of a group of parameters.
pub trait Param {
    /// Its value on the host.
    type Host;
    /// Its value in a kernel.
    type Regs<'k>;
    /// The part of a kernel's configuration that it depends on.
    type Config;

    /// Declares the parameter.
    fn declare<'k>(k: &'k Builder, name: &str, config: Self::Config) -> Self::Regs<'k>;

    /// Appends its arguments.
    fn push(host: &Self::Host, config: Self::Config, args: &mut Vec<Arg>);
}

/// The address of an array in global memory, u64 on the host.
#[derive(Debug)]
pub struct GlobalArray<T>(std::marker::PhantomData<T>);

macro_rules! scalars {
    ($($scalar:ty: $arg:path),*) => {$(
        impl Param for $scalar {
            type Host = Self;
            type Regs<'k> = Value<'k, Self>;
            type Config = ();

            #[track_caller]
            fn declare<'k>(k: &'k Builder, name: &str, (): ()) -> Value<'k, Self> {
                k.param(name)
            }

            fn push(host: &Self, (): (), args: &mut Vec<Arg>) {
                args.push($arg(host.clone()));
            }
        }
    )*};
}
scalars!(u32: Arg::U32, u64: Arg::U64, f32: Arg::F32);

impl<T: Stored> Param for GlobalArray<T> {
    type Host = u64;
    type Regs<'k> = Global<'k, T>;
    type Config = ();

    #[track_caller]
    fn declare<'k>(k: &'k Builder, name: &str, (): ()) -> Global<'k, T> {
        k.global(name)
    }

    fn push(host: &u64, (): (), args: &mut Vec<Arg>) {
        args.push(Arg::U64(*host));
    }
}

/// In a kernel, the address of the map.
impl Param for TensorMap {
    type Host = Self;
    type Regs<'k> = Value<'k, u64>;
    type Config = ();

    #[track_caller]
    fn declare<'k>(k: &'k Builder, name: &str, (): ()) -> Value<'k, u64> {
        k.tensor_map(name)
    }

    fn push(host: &Self, (): (), args: &mut Vec<Arg>) {
        args.push(Arg::TensorMap(host.clone().into()));
    }
}

/// A parameter that is declared if there is a configuration of it.
impl<P: Param> Param for Option<P> {
    type Host = Option<P::Host>;
    type Regs<'k> = Option<P::Regs<'k>>;
    type Config = Option<P::Config>;

    #[track_caller]
    fn declare<'k>(k: &'k Builder, name: &str, config: Self::Config) -> Self::Regs<'k> {
        config.map(|config| P::declare(k, name, config))
    }

    fn push(host: &Self::Host, config: Self::Config, args: &mut Vec<Arg>) {
        debug_assert_eq!(host.is_some(), config.is_some(), "an optional argument and its parameter");
        if let (Some(host), Some(config)) = (host, config) {
            P::push(host, config, args);
        }
    }
}

/// Parameters of one type whose configuration has their names.
impl<P: Param, const N: usize> Param for [P; N] {
    type Host = [P::Host; N];
    type Regs<'k> = [P::Regs<'k>; N];
    type Config = [(&'static str, P::Config); N];

    #[track_caller]
    fn declare<'k>(k: &'k Builder, name: &str, config: Self::Config) -> Self::Regs<'k> {
        config.map(|(of, config)| P::declare(k, &[name, of].concat(), config))
    }

    fn push(host: &Self::Host, config: Self::Config, args: &mut Vec<Arg>) {
        host.iter().zip(config).for_each(|(host, (_, config))| P::push(host, config, args));
    }
}

/// The configuration of an array of parameters with these names and one configuration each.
pub fn each<C: Copy, const N: usize>(names: [&'static str; N], config: C) -> [(&'static str, C); N] {
    names.map(|name| (name, config))
}

/// Declares the parameters of a kernel: the host struct, a struct of registers with a function `declare`, and a function
/// `args` of the host struct that returns the arguments in the order of the declaration.
///
/// ```
/// use tilewright_kernels::{params, params::GlobalArray};
/// use tilewright_ptx::build::Builder;
///
/// params! {
///     /// y = factor · x, and y += bias of each row
///     #[derive(Debug, Clone, Copy)]
///     pub struct ScaleParams => ScaleRegs(this, has_bias: bool) {
///         /// The grid; fields after `host` are no parameters.
///         host grid: [u32; 2],
///         /// Address of x: u64 on the host, `Global<f32>` in the kernel.
///         x: u64 as GlobalArray<f32>,
///         /// Address of y. The kernel's parameter is named "out".
///         y "out": u64 as GlobalArray<f32>,
///         /// A parameter of kernels for which `[..]` is `Some`.
///         bias: Option<u64> as Option<GlobalArray<f32>>[has_bias.then_some(())],
///         /// Multiplies x.
///         factor: f32,
///         // computed from the host struct, of which it is no field
///         rows: u32 = this.grid[0],
///     }
/// }
///
/// let kernel = Builder::kernel("scale", 32, |k| {
///     let p = ScaleRegs::declare(k, false);
///     p.y.at(k.thread()).store(p.x.at(k.thread()).load() * p.factor);
/// })?;
/// let names: Vec<_> = kernel.params.iter().map(|param| &*param.name).collect();
/// assert_eq!(names, ["x", "out", "factor", "rows"]);
/// let params = ScaleParams { grid: [1, 1], x: 256, y: 512, bias: None, factor: 2.0 };
/// assert_eq!(params.args(false).len(), 4);
/// # Ok::<(), tilewright_ptx::verify::Invalid>(())
/// ```
///
/// `[..]` is the [`Param::Config`] of a type, by default `()`. It may use the configuration, here `has_bias`. A host struct
/// is itself a [`Param`]: a field of its type declares all of its parameters, with the field's name before theirs.
#[macro_export]
macro_rules! params {
    ($(#[$meta:meta])* $vis:vis struct $Host:ident => $Regs:ident($this:ident) { $($fields:tt)* } $($more:tt)*) => {
        $crate::params! {
            $(#[$meta])* $vis struct $Host => $Regs($this, config: ()) { $($fields)* } $($more)*
        }
    };
    (
        $(#[$meta:meta])* $vis:vis struct $Host:ident => $Regs:ident($this:ident, $config:ident: $Config:ty) {
            $($fields:tt)*
        }
        $($more:tt)*
    ) => {
        $crate::params!(@field
            [$(#[$meta])* $vis $Host $Regs $this $config ($Config)] $this [] [] $($fields)*);
        $crate::params!($($more)*);
    };
    () => {};
    // Moves the first field to the list of host fields, and to that of parameters with its value.
    (@field $head:tt $this:ident [$($host:tt)*] $params:tt
        $(#[$doc:meta])* host $field:ident: $type:ty, $($rest:tt)*) => {
        $crate::params!(@field $head $this [$($host)* $(#[$doc])* pub $field: $type,] $params $($rest)*);
    };
    (@field $head:tt $this:ident $host:tt [$($params:tt)*]
        $(#[$doc:meta])* $field:ident $($name:literal)?: $type:ty $([$config:expr])? = $value:expr, $($rest:tt)*) => {
        $crate::params!(@field $head $this $host [$($params)*
            ($(#[$doc])* $field ($($name)?) $type, ($($config)?), $value)] $($rest)*);
    };
    (@field $head:tt $this:ident [$($host:tt)*] [$($params:tt)*]
        $(#[$doc:meta])* $field:ident $($name:literal)?: $type:ty as $param:ty $([$config:expr])?, $($rest:tt)*) => {
        $crate::params!(@field $head $this [$($host)* $(#[$doc])* pub $field: $type,]
            [$($params)* ($(#[$doc])* $field ($($name)?) $param, ($($config)?), $this.$field)] $($rest)*);
    };
    (@field $head:tt $this:ident $host:tt $params:tt
        $(#[$doc:meta])* $field:ident $($name:literal)?: $type:ty $([$config:expr])?, $($rest:tt)*) => {
        $crate::params!(@field $head $this $host $params
            $(#[$doc])* $field $($name)?: $type as $type $([$config])?, $($rest)*);
    };
    (@field
        [$(#[$meta:meta])* $vis:vis $Host:ident $Regs:ident $this:ident $config:ident ($Config:ty)] $_this:ident
        [$($host:tt)*]
        [$(($(#[$doc:meta])* $field:ident ($($name:literal)?) $type:ty, $of:tt, $value:expr))*]
    ) => {
        $(#[$meta])*
        $vis struct $Host { $($host)* }

        #[doc = concat!("[`", stringify!($Host), "`] in a kernel.")]
        #[derive(Debug, Clone, Copy)]
        #[allow(missing_docs, reason = "the name of a computed parameter says it")]
        $vis struct $Regs<'k> {
            $($(#[$doc])* pub $field: <$type as $crate::params::Param>::Regs<'k>,)*
        }

        impl $Host {
            /// The arguments in the order of the kernel's parameters.
            #[allow(dead_code, reason = "unused if this is a part of other parameters")]
            $vis fn args(&self, $config: $Config) -> Vec<::tilewright_ptx::sim::Arg> {
                let mut args = Vec::with_capacity(64);
                <Self as $crate::params::Param>::push(self, $config, &mut args);
                args
            }
        }

        impl<'k> $Regs<'k> {
            /// Declares the parameters.
            #[track_caller]
            #[allow(dead_code, reason = "unused if this is a part of other parameters")]
            $vis fn declare(k: &'k ::tilewright_ptx::build::Builder, $config: $Config) -> Self {
                <$Host as $crate::params::Param>::declare(k, "", $config)
            }
        }

        impl $crate::params::Param for $Host {
            type Host = Self;
            type Regs<'k> = $Regs<'k>;
            type Config = $Config;

            #[track_caller]
            fn declare<'k>(k: &'k ::tilewright_ptx::build::Builder, name: &str, $config: $Config) -> $Regs<'k> {
                let _line = k.at_line(::std::panic::Location::caller());
                let _ = $config;
                // fields are evaluated in source order
                $Regs {
                    $($field: <$type as $crate::params::Param>::declare(
                        k, &[name, $crate::params!(@name $field $($name)?)].concat(), $of
                    ),)*
                }
            }

            fn push($this: &Self, $config: $Config, args: &mut Vec<::tilewright_ptx::sim::Arg>) {
                let _ = $config;
                $(<$type as $crate::params::Param>::push(&$value, $of, args);)*
            }
        }
    };
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $name:literal) => { $name };
}
