-- What people may try in a box that runs SQL, one statement a line, by what it is after. {file} is a
-- text file outside the store, {store} the store's folder, {db} a DuckDB file, {out} a free path.

-- files
SELECT * FROM read_text('{file}')
SELECT * FROM read_blob('{file}')
SELECT * FROM read_csv('{file}')
SELECT * FROM read_csv_auto('{file}')
SELECT * FROM sniff_csv('{file}')
SELECT * FROM read_json('{file}')
SELECT * FROM read_json_auto('{file}')
SELECT * FROM read_json_objects('{file}')
SELECT * FROM read_ndjson('{file}')
SELECT * FROM read_ndjson_objects('{file}')
SELECT * FROM read_parquet('{file}')
SELECT * FROM parquet_scan('{file}')
SELECT * FROM parquet_metadata('{file}')
SELECT * FROM parquet_schema('{file}')
SELECT * FROM parquet_kv_metadata('{file}')
SELECT * FROM parquet_file_metadata('{file}')
SELECT * FROM glob('/etc/*')
SELECT * FROM glob('*')
SELECT * FROM glob('{store}/*')
SELECT * FROM '{file}'
SELECT * FROM "{file}"
FROM '{file}'
TABLE '{file}'
SELECT * FROM 'file://{file}'
SELECT * FROM read_text('file://{file}')
SELECT * FROM read_text('/proc/self/environ')
SELECT * FROM read_text('/dev/stdin')
SELECT * FROM read_text(['{file}', '{file}'])
SELECT * FROM read_text('live/../../../{file}')
SELECT * FROM read_text('{store}/live/../settler.lock')
SELECT * FROM read_text('data/../catalogue.stamp')
SELECT * FROM read_blob('{store}/../traces.duckdb')
SELECT * FROM read_csv('/dev/fd/0')
SELECT * FROM read_text((SELECT '{file}'))
SELECT (SELECT content FROM read_text('{file}'))
SELECT * FROM spans WHERE name IN (SELECT content FROM read_text('{file}'))
SELECT * FROM spans, LATERAL (SELECT * FROM read_text('{file}'))
SELECT * FROM spans JOIN read_text('{file}') AS t ON t.filename = spans.name
SELECT name FROM spans UNION ALL SELECT content FROM read_text('{file}')
WITH t AS (SELECT * FROM read_text('{file}')) SELECT * FROM t
WITH t AS MATERIALIZED (SELECT * FROM read_text('{file}')) SELECT * FROM t
WITH RECURSIVE t(x) AS (SELECT content FROM read_text('{file}') UNION SELECT x FROM t) FROM t
WITH x AS (SELECT 1) SELECT * FROM (WITH "{file}" AS (SELECT 2) FROM x), '{file}'
WITH a AS (FROM '{file}'), "{file}" AS (SELECT 1) FROM a
WITH "{file}" AS (FROM "{file}") FROM "{file}"
SELECT * FROM query('SELECT * FROM read_text(''{file}'')')
SELECT * FROM query_table('{file}')
SELECT * FROM query_table(['{file}'])
SELECT * FROM json_execute_serialized_sql(json_serialize_sql('SELECT * FROM read_text(''{file}'')'))
SELECT json_serialize_plan('SELECT * FROM read_csv(''{file}'')')
SELECT 'SELECT * FROM read_csv(''{file}'')'.json_serialize_plan()
SELECT list_transform([1], x -> (SELECT content FROM read_text('{file}')))
DESCRIBE SELECT * FROM read_csv('{file}')
DESCRIBE '{file}'
SUMMARIZE '{file}'
SUMMARIZE SELECT * FROM read_text('{file}')
EXPLAIN SELECT * FROM read_text('{file}')
EXPLAIN ANALYZE SELECT * FROM read_text('{file}')
EXPLAIN (FORMAT json) SELECT * FROM read_text('{file}')
EXPLAIN /* */ ANALYZE SELECT * FROM read_text('{file}')
SELECT * FROM (PIVOT read_text('{file}') ON filename IN ('a') USING count(*))
SELECT * FROM (UNPIVOT '{file}' ON COLUMNS(*))
SELECT * FROM (DESCRIBE '{file}')
VALUES ((SELECT content FROM read_text('{file}')))
SELECT content FROM read_text('{file}') ORDER BY (SELECT content FROM read_text('{file}')) LIMIT 1
SELECT 1 LIMIT (SELECT count(*) FROM read_text('{file}'))
SELECT sum(1) OVER (ORDER BY (SELECT content FROM read_text('{file}')))
SELECT CASE WHEN exists(FROM '{file}') THEN 1 END
SELECT * FROM which_secret('{file}', 's3')
SELECT * FROM "read_text"('{file}')
SELECT * FROM READ_TEXT('{file}')
SELECT * FROM main.read_text('{file}')
SELECT * FROM system.main.read_text('{file}')
SELECT * FROM memory.main.'{file}'
SELECT * FROM main."{file}"
FROM spans, '{file}' AS x
FROM spans SEMI JOIN '{file}' USING (name)
FROM spans POSITIONAL JOIN '{file}'
SELECT COLUMNS(c -> c IN (SELECT content FROM read_text('{file}'))) FROM spans
SELECT * EXCLUDE (name) REPLACE ((SELECT content FROM read_text('{file}')) AS kind) FROM spans
SELECT count(*) FILTER (exists(FROM '{file}')) FROM spans GROUP BY GROUPING SETS (((FROM '{file}')))
SELECT {'a': (FROM read_text('{file}'))}, [x FOR x IN (SELECT list(content) FROM read_text('{file}'))]
SELECT name FROM spans QUALIFY row_number() OVER (ORDER BY (SELECT content FROM read_text('{file}'))) = 1
SELECT name FROM spans TABLESAMPLE reservoir(1) LIMIT (SELECT length(content) FROM read_text('{file}'))
SELECT DISTINCT ON ((SELECT content FROM read_text('{file}'))) name FROM spans
WITH RECURSIVE t AS (SELECT 1 AS x UNION ALL (SELECT x FROM t, '{file}')) FROM t
WITH t AS (SELECT 1) SELECT * FROM main.t

-- other databases
ATTACH '{db}' AS other
ATTACH '{db}' AS other (READ_ONLY)
ATTACH '{out}' AS other
ATTACH ':memory:' AS other
SELECT * FROM read_duckdb('{db}', table_name := 't')
SELECT * FROM '{db}'
SELECT * FROM '{store}/../traces.duckdb'
SELECT * FROM other.main.t
SELECT * FROM system.main.duckdb_settings
SELECT * FROM temp.main.spans
USE memory
DETACH memory
IMPORT DATABASE '{out}'

-- network
SELECT * FROM 'http://127.0.0.1:{port}/x.csv'
SELECT * FROM 'https://127.0.0.1:{port}/x.parquet'
SELECT * FROM read_text('http://127.0.0.1:{port}/x')
SELECT * FROM read_csv('https://127.0.0.1:{port}/x.csv')
SELECT * FROM read_parquet('s3://bucket/x.parquet')
SELECT * FROM read_parquet('gcs://bucket/x.parquet')
SELECT * FROM read_parquet('azure://bucket/x.parquet')
SELECT * FROM read_parquet('hf://datasets/a/b/x.parquet')
ATTACH 'http://127.0.0.1:{port}/x.duckdb' AS other
ATTACH 'postgres://127.0.0.1:{port}/x' AS other (TYPE postgres)
INSTALL httpfs
INSTALL httpfs FROM 'http://127.0.0.1:{port}'
FORCE INSTALL httpfs FROM community
LOAD httpfs
LOAD '{out}.duckdb_extension'
UPDATE EXTENSIONS
SELECT * FROM register_external_resource_type('x')
SELECT * FROM create_external_resource('x', 'y')

-- settings and secrets
SELECT current_setting('temp_directory')
SELECT ('home_directory').current_setting()
SELECT memory.main.current_setting('threads')
SELECT "current_setting"('threads')
SELECT system.main.current_setting('threads')
SELECT list_transform(['threads'], lambda x: current_setting(x))
SELECT getvariable('x')
SELECT * FROM duckdb_settings()
SELECT * FROM duckdb_secrets()
SELECT * FROM duckdb_variables()
SELECT * FROM duckdb_databases()
SELECT * FROM duckdb_views()
SELECT * FROM duckdb_tables()
SELECT * FROM duckdb_extensions()
SELECT * FROM duckdb_logs()
SELECT * FROM duckdb_temporary_files()
SELECT * FROM duckdb_external_file_cache()
SELECT * FROM duckdb_prepared_statements()
SELECT * FROM pragma_database_list
SELECT * FROM pragma_database_list()
SELECT * FROM pragma_database_size()
SELECT * FROM pragma_user_agent()
SELECT * FROM pragma_platform()
SELECT * FROM sqlite_master
SELECT * FROM information_schema.tables
SELECT * FROM pg_catalog.pg_settings
SELECT * FROM pg_catalog.pg_views
SHOW DATABASES
SHOW VARIABLES
SHOW SETTINGS
FROM (SHOW DATABASES)
PRAGMA database_list
PRAGMA show_tables
PRAGMA table_info('spans')
PRAGMA threads
PRAGMA enable_profiling
PRAGMA profiling_output='{out}'
PRAGMA enable_external_access=true
CALL duckdb_settings()
CALL pragma_version()
CALL enable_logging(storage => 'file', storage_path => '{out}')
CALL enable_profiling()
SELECT * FROM enable_logging('QueryLog')
SET lock_configuration = false
SET enable_external_access = true
SET allowed_directories = ['/']
SET allowed_paths = ['{file}']
SET memory_limit = '100GB'
SET threads = 64
SET temp_directory = '{out}'
SET home_directory = '{out}'
SET log_query_path = '{out}'
SET profiling_output = '{out}'
SET python_enable_replacements = true
SET SESSION search_path = 'x'
SET VARIABLE x = (SELECT content FROM read_text('{file}'))
RESET lock_configuration
RESET VARIABLE x
CREATE SECRET s (TYPE s3, KEY_ID 'x', SECRET 'y')
CREATE PERSISTENT SECRET s (TYPE s3, KEY_ID 'x', SECRET 'y')
DROP SECRET s
SELECT nextval('s')
SELECT setval('s', 1)
SELECT write_log('x', level := 'error')
SELECT sleep_ms(1)
SELECT current_query_id()
SELECT * FROM con
SELECT * FROM text
SELECT * FROM job
SELECT * FROM python_map_function(1)
SELECT * FROM pandas_scan(140000000)
SELECT * FROM arrow_scan(140000000, 140000000, 140000000)
SELECT * FROM arrow_scan_dumb(140000000, 140000000, 140000000)
SELECT * FROM seq_scan('spans')

-- writes
COPY (SELECT 1) TO '{out}'
COPY spans TO '{out}' (FORMAT parquet)
COPY (SELECT 1) TO '{store}/data/x.parquet' (FORMAT parquet)
COPY (SELECT 1) TO 'data/x.parquet' (FORMAT parquet)
COPY (SELECT 1) TO 'live/x.ndjson'
COPY (SELECT 1) TO '/dev/stdout'
COPY (SELECT 1) TO 'manifest.ndjson'
COPY (SELECT 1) TO 'manifest.ndjson' (USE_TMP_FILE false)
COPY (SELECT 1) TO 'data/_empty.parquet' (FORMAT parquet, USE_TMP_FILE false)
COPY (SELECT 1) TO 'data' (FORMAT parquet, PER_THREAD_OUTPUT, OVERWRITE)
COPY (SELECT 1) TO '{out}' (FORMAT parquet, PARTITION_BY (1))
COPY FROM DATABASE memory TO other
EXPORT DATABASE '{out}'
EXPLAIN COPY (SELECT 1) TO '{out}'
EXPLAIN ANALYZE COPY (SELECT 1) TO '{out}'
EXPLAIN ANALYZE COPY (SELECT 1) TO 'data/x.parquet' (FORMAT parquet)
CREATE TABLE t AS SELECT 1
CREATE TEMP TABLE t AS SELECT 1
CREATE VIEW spans2 AS SELECT 1
CREATE OR REPLACE VIEW spans AS SELECT 1
CREATE MACRO m(x) AS x
CREATE FUNCTION m(x) AS TABLE FROM read_text(x)
CREATE SEQUENCE s
CREATE TYPE mood AS ENUM ('a')
CREATE SCHEMA s
CREATE INDEX i ON spans (name)
DROP VIEW spans
DROP SCHEMA main CASCADE
ALTER VIEW spans RENAME TO x
INSERT INTO spans SELECT * FROM spans
UPDATE spans SET name = 'x'
DELETE FROM spans
TRUNCATE spans
MERGE INTO spans USING (SELECT 1) ON true WHEN MATCHED THEN DELETE
WITH d AS (DELETE FROM spans RETURNING *) SELECT * FROM d
WITH d AS (INSERT INTO spans SELECT * FROM spans RETURNING *) SELECT * FROM d
WITH d AS (UPDATE spans SET name = 'x' RETURNING *) SELECT * FROM d
WITH d AS (COPY (SELECT 1) TO '{out}') SELECT * FROM d
WITH a AS (WITH d AS (DELETE FROM spans RETURNING *) FROM d) FROM a
SELECT * FROM (WITH d AS (DELETE FROM spans RETURNING *) SELECT * FROM d)
EXPLAIN ANALYZE WITH d AS (DELETE FROM spans RETURNING *) SELECT * FROM d
CHECKPOINT
FORCE CHECKPOINT
VACUUM
ANALYZE
BEGIN
COMMIT
ROLLBACK
PREPARE p AS SELECT 1
EXECUTE p
DEALLOCATE p
CALL force_checkpoint()
SELECT * FROM checkpoint()
SELECT * FROM truncate_duckdb_logs()
COMMENT ON VIEW spans IS 'x'

-- several at once
SELECT 1; SELECT 2
SELECT 1; COPY (SELECT 1) TO '{out}'
SELECT 1; ; DELETE FROM spans
SELECT 1 /* ; */ ; SET threads = 1
;

-- harmless
SELECT count(*) AS n FROM spans
FROM spans SELECT name, kind ORDER BY start_ns DESC LIMIT 3
TABLE rewards
FROM rollouts
SELECT * FROM calls WHERE agent LIKE 'a%' AND start_ns > 0
SELECT * FROM main.spans LIMIT 1
SELECT * FROM memory.main.SPANS LIMIT 1
WITH named AS (SELECT name FROM spans) SELECT name, count(*) FROM named GROUP BY ALL HAVING count(*) > 0
WITH a AS (SELECT 1 AS x), b AS (SELECT x + 1 AS x FROM a) FROM a UNION ALL FROM b
WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t WHERE x < 5) SELECT sum(x) FROM t
WITH m AS MATERIALIZED (SELECT 1 AS x) SELECT * FROM m, m AS n
SELECT name FROM spans INTERSECT SELECT name FROM spans EXCEPT SELECT 'x'
SELECT attributes->>'$."gen_ai.operation.name"', json_extract_string(attributes, '$.x') FROM spans
SELECT key, value FROM spans, json_each(attributes) LIMIT 5
SELECT unnest(['a', 'b']), unnest(range(2))
SELECT * FROM range(3), generate_series(1, 2), unnest([1, 2])
SELECT row_number() OVER (PARTITION BY name ORDER BY start_ns), lag(name) OVER (ORDER BY start_ns) FROM spans
SELECT name, start_ns FROM spans QUALIFY row_number() OVER (PARTITION BY name ORDER BY start_ns) = 1
SELECT avg(reward), median(reward), quantile_cont(reward, 0.9), count(*) FILTER (reward > 0) FROM spans
SELECT list(name ORDER BY start_ns), string_agg(name, ','), arg_max(name, start_ns), any_value(kind) FROM spans
SELECT histogram(kind), mode(name), approx_quantile(start_ns, 0.5) FROM spans
SELECT make_timestamp(start_ns // 1000), strftime(make_timestamp(start_ns // 1000), '%Y'), epoch_ms(0) FROM spans
SELECT date_trunc('hour', make_timestamp(start_ns // 1000)) AS hour, count(*) FROM spans GROUP BY 1 ORDER BY 1
SELECT regexp_extract(name, '(\w+)', 1), upper(name), name ILIKE '%a%', name SIMILAR TO 'a.*', len(name) FROM spans
SELECT coalesce(agent, 'none'), nullif(name, ''), if(reward > 0, 1, 0), CASE kind WHEN 'x' THEN 1 ELSE 2 END FROM spans
SELECT try_cast(name AS INTEGER), name::VARCHAR, cast(start_ns AS DOUBLE) FROM spans
SELECT list_transform([1, 2], lambda x: x + 1), [x * 2 FOR x IN [1, 2]], list_filter([1], lambda x: x > 0)
SELECT {'a': 1, 'b': [1, 2]}, MAP {'k': 'v'}, struct_pack(x := 1), [1, 2][1], {'a': 1}.a
SELECT md5(name), hash(name), uuid() IS NOT NULL, random() < 1, today() > DATE '2020-01-01' FROM spans
SELECT * EXCLUDE (attributes) REPLACE (upper(name) AS name) FROM spans
SELECT COLUMNS('.*_id') FROM spans
SELECT kind, name, count(*) FROM spans GROUP BY ROLLUP (kind, name)
SELECT kind, grouping(kind), count(*) FROM spans GROUP BY GROUPING SETS ((kind), ())
SELECT * FROM (PIVOT spans ON kind IN ('internal') USING count(*) GROUP BY name)
SELECT * FROM (UNPIVOT (SELECT 1 AS a, 2 AS b) ON a, b)
SELECT * FROM spans TABLESAMPLE 50 PERCENT
SELECT s.name FROM spans AS s LEFT JOIN rewards AS r USING (trace_id, span_id) ANTI JOIN calls AS c ON c.span_id = s.span_id
SELECT s.name FROM spans AS s ASOF JOIN spans AS t ON s.trace_id = t.trace_id AND s.start_ns >= t.start_ns
SELECT * FROM spans AS s POSITIONAL JOIN rewards AS r
SELECT (SELECT count(*) FROM calls), exists(FROM spans), 1 IN (SELECT 2), 3 > ALL (SELECT 1)
SELECT current_date, current_timestamp::VARCHAR IS NOT NULL, interval 1 day, 1 BETWEEN 0 AND 2, NOT true
VALUES (1, 'a'), (2, 'b')
SELECT 1 WHERE 1 = 0
SHOW TABLES
SHOW ALL TABLES
SHOW spans
DESCRIBE
DESCRIBE spans
DESCRIBE SELECT 1 AS x
SUMMARIZE rewards
EXPLAIN SELECT * FROM spans
EXPLAIN ANALYZE SELECT count(*) FROM spans
SELECT 1;
