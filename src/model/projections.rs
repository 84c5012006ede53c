//! Queries, keys and values of this rank's heads: from one product, or from three where something is done to them before
//! they meet, or where they are of two texts; or from narrow vectors that heads share (`latent.rs`).

use std::sync::Arc;

use guildhall_comm::Error;
use guildhall_tensor::{Device, Var};

use super::latent::Latent;
use super::linear::{Cut, Linear, LinearShape};
use super::norm::{HeadNorm, WidthNorm};
use super::{HeadsKind, QueryKeyNorm, Sizes};
use crate::parallel::{Mesh, Parameters, Stream, Weight};

/// Weights of queries, keys and values.
#[derive(Debug)]
pub(super) enum Projections {
    /// Side by side.
    Fused(Box<Fused>),
    Apart(Box<Apart>),
    Latent(Box<Latent>),
}

#[derive(Debug)]
pub(super) struct Fused {
    /// Of this rank's heads: of all three, or of queries.
    own: Linear,
    shared: Option<SharedHeads>,
}

#[derive(Debug)]
pub(super) struct Apart {
    queries: Linear,
    keys: Linear,
    values: Linear,
    /// Where heads of keys and values are fewer than ranks: which of all outputs of keys, and of values, are used here.
    rows: Option<Vec<u32>>,
    /// Of queries and keys.
    norms: Norms,
}

/// Norms of queries and of keys.
#[derive(Debug)]
enum Norms {
    None,
    /// Of each head by itself.
    Head([HeadNorm; 2]),
    /// Of all heads together.
    Width([WidthNorm; 2]),
}

impl Norms {
    fn new(maker: &Maker) -> Norms {
        let HeadsKind { heads, kv_heads, head_dim, query_key_norm, .. } = maker.heads;
        let name = |part: &str| format!("{}.{part}_norm", maker.name);
        match query_key_norm {
            QueryKeyNorm::None => Norms::None,
            QueryKeyNorm::Head => {
                Norms::Head(["q", "k"].map(|part| HeadNorm::new(maker.device, &name(part), head_dim, maker.sizes)))
            }
            QueryKeyNorm::Width => Norms::Width([("q", heads), ("k", kv_heads)].map(|(part, heads)| {
                WidthNorm::new(maker.device, &name(part), heads * head_dim, maker.sizes, maker.mesh)
            })),
        }
    }

    /// x are queries (0) or keys (1) of this rank's heads.
    fn forward(&self, x: Var, which: usize, stream: &Stream) -> Result<Var, Error> {
        Ok(match self {
            Norms::None => x,
            Norms::Head(norms) => norms[which].forward(&x),
            Norms::Width(norms) => norms[which].forward(&x, stream.group())?,
        })
    }
}

/// Where heads of keys and values are fewer than ranks: those of all heads, and which of their outputs are used here.
#[derive(Debug)]
struct SharedHeads {
    keys_values: Linear,
    rows: Vec<u32>,
}

/// What the linear layers of one attention are made from.
pub(super) struct Maker<'a> {
    pub(super) device: &'a Arc<Device>,
    pub(super) name: &'a str,
    pub(super) sizes: &'a Sizes,
    pub(super) mesh: &'a Mesh,
    pub(super) heads: HeadsKind,
}

impl Maker<'_> {
    fn linear(&self, parts: &[(&str, usize)], cut: Cut) -> Linear {
        let name = |part: &str| format!("{}.{part}_proj", self.name);
        let outputs: Vec<_> = parts.iter().map(|(part, heads)| (name(part), heads * self.heads.head_dim)).collect();
        let shape = LinearShape { outputs: &outputs, inputs: self.sizes.model.d_model, cut };
        Linear::new(self.device, shape, self.sizes, (self.sizes.init(), self.heads.biases))
    }

    /// Which outputs of keys belong to the one head that this rank's queries read, if its ranks share heads.
    fn shared_rows(&self) -> Option<Vec<u32>> {
        let (rank, ranks) = (self.mesh.tensor.rank(), self.mesh.tensor.size());
        let HeadsKind { kv_heads, head_dim, .. } = self.heads;
        let first = rank * kv_heads / ranks * head_dim;
        (!kv_heads.is_multiple_of(ranks)).then(|| (first as u32..(first + head_dim) as u32).collect())
    }

    fn fused(&self) -> Fused {
        let HeadsKind { heads, kv_heads, head_dim, .. } = self.heads;
        let [q, k, v] = [("q", heads), ("k", kv_heads), ("v", kv_heads)];
        let Some(keys) = self.shared_rows() else {
            return Fused { own: self.linear(&[q, k, v], Cut::Outputs(self.mesh)), shared: None };
        };
        let values = keys.iter().map(|row| row + (kv_heads * head_dim) as u32);
        let rows = keys.iter().copied().chain(values).collect();
        let shared = Some(SharedHeads { keys_values: self.linear(&[k, v], Cut::Shared), rows });
        Fused { own: self.linear(&[q], Cut::Outputs(self.mesh)), shared }
    }

    fn apart(&self) -> Apart {
        let rows = self.shared_rows();
        let cut = if rows.is_some() { Cut::Shared } else { Cut::Outputs(self.mesh) };
        Apart {
            queries: self.linear(&[("q", self.heads.heads)], Cut::Outputs(self.mesh)),
            keys: self.linear(&[("k", self.heads.kv_heads)], cut),
            values: self.linear(&[("v", self.heads.kv_heads)], cut),
            rows,
            norms: Norms::new(self),
        }
    }
}

impl Projections {
    /// For tokens that attend to tokens of the same text.
    pub(super) fn of_one_text(maker: &Maker) -> Projections {
        let HeadsKind { query_key_norm, scaled, sinks, latent, .. } = maker.heads;
        if let Some(kind) = latent {
            return Projections::Latent(Box::new(Latent::new(maker, kind)));
        }
        match query_key_norm {
            QueryKeyNorm::None if scaled && !sinks => Projections::Fused(Box::new(maker.fused())),
            QueryKeyNorm::None | QueryKeyNorm::Head | QueryKeyNorm::Width => Projections::of_two_texts(maker),
        }
    }

    /// For tokens that attend to tokens of another text.
    pub(super) fn of_two_texts(maker: &Maker) -> Projections {
        Projections::Apart(Box::new(maker.apart()))
    }

    /// Of all tokens x `[T, D]`: queries, keys and values, in one value or in three. Keys and values are of `memory`'s
    /// tokens, if there are such. Collective over the stream's group where all heads are normed together.
    ///
    /// # Errors
    /// What the group reports; so for what follows.
    ///
    /// # Panics
    /// On a memory where projections are of one text.
    pub(super) fn of(&self, x: &Var, memory: Option<&Var>, stream: &Stream) -> Result<Vec<Var>, Error> {
        match self {
            Projections::Fused(fused) => {
                assert!(memory.is_none(), "queries and keys of two texts are not of one product");
                Ok(vec![fused.forward(x)])
            }
            Projections::Apart(apart) => apart.forward([x, memory.unwrap_or(x)], stream),
            Projections::Latent(latent) => {
                assert!(memory.is_none(), "latent keys are of the text that reads them");
                Ok(latent.forward(x))
            }
        }
    }

    /// Of tokens that attend to those of another text.
    ///
    /// # Errors
    /// As [`Projections::of`].
    ///
    /// # Panics
    /// As [`Projections::of`]; so for what follows.
    pub(super) fn queries(&self, x: &Var, stream: &Stream) -> Result<Var, Error> {
        self.apart().queries(x, stream)
    }

    /// Of the tokens of another text.
    ///
    /// # Errors
    /// As [`Projections::of`].
    pub(super) fn keys_values(&self, memory: &Var, stream: &Stream) -> Result<[Var; 2], Error> {
        self.apart().keys_values(memory, stream)
    }

    fn apart(&self) -> &Apart {
        match self {
            Projections::Fused(_) | Projections::Latent(_) => {
                panic!("queries and keys of two texts are not of one product")
            }
            Projections::Apart(apart) => apart,
        }
    }
}

impl Fused {
    fn forward(&self, x: &Var) -> Var {
        match &self.shared {
            None => self.own.forward(x),
            Some(SharedHeads { keys_values, rows }) => self.own.forward_with(x, keys_values, rows),
        }
    }
}

impl Apart {
    /// Queries of one text's tokens, keys and values of another's.
    fn forward(&self, [of, to]: [&Var; 2], stream: &Stream) -> Result<Vec<Var>, Error> {
        let queries = self.queries(of, stream)?;
        Ok([queries].into_iter().chain(self.keys_values(to, stream)?).collect())
    }

    fn queries(&self, of: &Var, stream: &Stream) -> Result<Var, Error> {
        self.norms.forward(self.queries.forward(of), 0, stream)
    }

    fn keys_values(&self, to: &Var, stream: &Stream) -> Result<[Var; 2], Error> {
        let of_keys = |linear: &Linear| match &self.rows {
            None => linear.forward(to),
            Some(rows) => linear.forward_rows(to, rows),
        };
        let [keys, values] = [of_keys(&self.keys), of_keys(&self.values)];
        Ok([self.norms.forward(keys, 1, stream)?, values])
    }
}

impl Parameters for Projections {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        match self {
            Projections::Fused(fused) => {
                let Fused { own, shared } = &mut **fused;
                own.visit(f);
                shared.iter_mut().for_each(|shared| shared.keys_values.visit(f));
            }
            Projections::Apart(apart) => {
                let Apart { queries, keys, values, norms, .. } = &mut **apart;
                [queries, keys, values].into_iter().for_each(|linear| linear.visit(f));
                match norms {
                    Norms::None => {}
                    Norms::Head(norms) => norms.iter_mut().for_each(|norm| norm.visit(f)),
                    Norms::Width(norms) => norms.iter_mut().for_each(|norm| norm.visit(f)),
                }
            }
            Projections::Latent(latent) => latent.visit(f),
        }
    }
}
